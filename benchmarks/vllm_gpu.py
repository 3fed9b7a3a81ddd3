"""Speed of vLLM on one GPU or several: its softmax model, ours with linear heads alone, and with some exact heads.

    python benchmarks/vllm_gpu.py --output build/vllm_gpu         # all parts, one process after another
    python benchmarks/vllm_gpu.py exact --output build/vllm_gpu   # one part; exact-document is another
    python benchmarks/vllm_gpu.py linear --shape 405b --gpus 8 --output build/vllm_405b

Each part writes a file after each of its rows; no row takes longer than `--row-seconds`, and none begins after
`--seconds`. What the files have already is not measured again, so that a run that was cut off can be repeated.
`table.json` has the rows of all parts.

Random weights in the shape of a Llama 3, of 8B by default, which vLLM makes itself; with `--gpus` tensor parallel.
Prefill is measured on prompts, decoding over contexts that vLLM's DecodeBenchConnector declares read, so that no time
goes into them. `rows` puts both together: the time of a row is that of its prompts' tokens, and then of its new ones at
the speed of the middle of the answer with as many sequences as fit at once. Beside it stands a bound: products at 700
TFLOP/s, weights and caches read at 4.3 TB/s, 0.9 of the memory. CUDA graphs for decoding, no torch.compile. The
document that all ask about has an engine of its own that caches prefixes; where vLLM takes wrong states from its cache
(before 0.28), that row says so for our models.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from lolcats.plan import SHAPES as KNOWN

SHAPES = {name.removeprefix("llama3-"): sizes for name, sizes in KNOWN.items() if name.startswith("llama3-")} | {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    },
}
EXACT_SHARE = 0.12
# (prompt, new, clients) of the rows; decoding is measured at their middles.
ROWS = [
    (1024, 512, 1),
    (1024, 512, 256),
    (8192, 512, 256),
    (32768, 512, 128),
    (1024, 8192, 512),
    (2048, 16384, 256),
]
DOCUMENT = (32768, 512, 256)  # one text that all clients ask about
SHORTER = {"tiny": 64}  # contexts are divided by this
MEASURED = 88  # new tokens of a sequence that are measured: more than a window's block, so that one leaves
MODELS = ("softmax", "linear", "exact")
PARTS = (*MODELS, *(f"{model}-document" for model in MODELS))
# The bound.
FLOPS, BYTES_PER_S, MEMORY_SHARE = 700e12, 4.3e12, 0.9
BEGIN = time.perf_counter()


def make_folder(model: str, shape: str, path: Path) -> Path:
    """A folder with a configuration alone."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from lolcats.config.attention import AttentionConfig
    from lolcats.conversion import convert

    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=65536, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    if model != "softmax":
        kv_heads, layers = config.num_key_value_heads, config.num_hidden_layers
        count = max(round(EXACT_SHARE * kv_heads * layers), 1) if model == "exact" else 0
        heads = tuple(f"{i % layers}.{(3 * i + i // layers) % kv_heads}" for i in range(count))
        with torch.device("meta"):
            base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            config = convert(base, AttentionConfig(exact=heads)).config
        config.architectures = ["LolcatsForCausalLM"]
        config.dtype = torch.bfloat16
    config.save_pretrained(path)
    return path


def prepare(worker: Any) -> dict[str, Any]:
    """In each of vLLM's processes: fill the whole cache with bytes that make 0.0115 in bfloat16 and float32.

    Returns:
        What its layers hold.
    """
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector

    # It would fill all states again for each request.
    decode_bench_connector.DecodeBenchConnectorWorker.start_fill_kv = lambda *_: None
    layers = list(worker.vllm_config.compilation_config.static_forward_context.values())
    for layer in layers:
        held = getattr(layer, "kv_cache", ())
        for tensor in [held] if isinstance(held, torch.Tensor) else held:
            if tensor.numel():
                torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).fill_(60)
    names = [layer.get_attn_backend().get_name() for layer in layers]
    exact = [layer for layer in layers if not hasattr(layer, "layout")]
    return {
        "softmax_heads": sum(layer.num_heads for layer in exact),
        "state_bytes": sum(layer.layout.nbytes for layer in layers if hasattr(layer, "layout")),
        "token_bytes": sum(4 * layer.num_kv_heads * layer.head_size for layer in exact),
        "backends": {name: names.count(name) for name in sorted(set(names))},
    }


class Bench:
    """An engine in this process, and what was measured, written to a file after each measurement."""

    def __init__(self, part: str, shape: str, gpus: int, output: Path, more: dict[str, Any]) -> None:
        from vllm import LLM

        self.output, self.shorter, self.end = output, SHORTER.get(shape, 1), math.inf
        self.found: dict[str, Any] = identity(part, shape, gpus)
        model, _, document = part.partition("-")
        path = make_folder(model, shape, Path(tempfile.mkdtemp()))
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "tensor_parallel_size": gpus,
            "skip_tokenizer_init": True,
            "max_model_len": 33280 // self.shorter + MEASURED,
            "max_num_seqs": 512,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": bool(document),
            "gpu_memory_utilization": 0.92,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 8, 32, 64, 104, 128, 176, 256, 512],
            },
        }
        if not document:
            settings["kv_transfer_config"] = {
                "kv_connector": "DecodeBenchConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"fill_mean": 0.015},
            }
        self.llm = LLM(str(path), **(settings | more))
        self.engine: Any = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.filled, self.round = False, 0
        connector = self.scheduler.connector
        if connector is not None:
            match = connector.get_num_new_matched_tokens
            connector.get_num_new_matched_tokens = lambda *args: match(*args) if self.filled else (0, False)
        self.found |= {"settings": settings | more, "start_s": time.perf_counter() - BEGIN}
        self.found |= self._sizes(self.llm.collective_rpc(prepare)[0])

    def _sizes(self, held: dict[str, Any]) -> dict[str, Any]:
        """Bytes of weights, of a sequence's states and of a token's keys and values; how many longest sequences fit.

        Args:
            held: of one GPU, from `prepare`; the heads are divided among all.
        """
        import torch
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        config = self.engine.vllm_config
        shared = ("softmax_heads", "state_bytes", "token_bytes")
        shape = SHAPES[self.found["shape"]]
        hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
        kv_width = shape["num_key_value_heads"] * hidden // heads
        block = 2 * hidden * (hidden + kv_width) + 3 * hidden * shape["intermediate_size"]
        products = shape["num_hidden_layers"] * block
        return {
            "weights_bytes": 2 * (products + hidden * shape["vocab_size"]),
            "products_of_a_token": products,
            "head_dim": hidden // heads,
            **held,
            **{name: held[name] * self.found["gpus"] for name in shared},
            "memory_bytes": torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None,
            "max_model_len": config.model_config.max_model_len,
            "sequences_that_fit": get_max_concurrency_for_kv_cache_config(config, self.scheduler.kv_cache_config),
        }

    def save(self) -> None:
        self.output.write_text(json.dumps(self.found, indent=1, default=str), encoding="utf-8")

    def run(self, prompts: list[list[int]], new: int, *, filled: bool = False) -> dict[str, Any]:
        """Answers of `new` tokens; with `filled` only the last token of each prompt is computed.

        Raises:
            TimeoutError: the row's time is over.
        """
        from vllm import SamplingParams

        self.filled = filled
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        self.round += 1
        names = [f"{self.round}-{i}" for i in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        begin = time.perf_counter()
        steps: list[tuple[float, int, int, int]] = []  # time at the end, new tokens in all, running, begun to answer
        tokens, first, seen = 0, {}, {}
        while self.engine.has_unfinished_requests() and time.perf_counter() < self.end:
            outputs = self.engine.step()
            now = time.perf_counter() - begin
            for output in outputs:
                have = len(output.outputs[0].token_ids)
                tokens += have - seen.get(output.request_id, 0)
                seen[output.request_id] = have
                first.setdefault(output.request_id, now)
            steps.append((now, tokens, len(self.scheduler.running), len(first)))
            if new > 1 and max(seen.values(), default=0) >= new - 1:  # the first ones end: nothing is steady any more
                break
        self.engine.abort_request(names)
        for _ in range(3):
            if self.engine.has_unfinished_requests():
                self.engine.step()
        if time.perf_counter() > self.end:
            raise TimeoutError(f"{len(first)} of {len(prompts)} sequences had begun to answer")
        return {"steps": steps, "first_s": max(first.values())}

    def prompts(self, length: int, count: int) -> list[list[int]]:
        """Texts of which no two, of all rounds, begin alike."""
        return [[self.round % 997, i, *((31 * i + 7 * j) % 997 for j in range(length - 2))] for i in range(count)]

    def record(self, kind: str, entry: Any) -> None:
        self.found.setdefault(kind, []).append(entry)
        print(self.found["model"], kind, entry, flush=True)
        self.save()

    def prefill(self, length: int, count: int) -> None:
        """Tokens per second of prompts, and the time to the last first token: the better of two runs."""
        length //= self.shorter
        seconds = min(self.run(self.prompts(length, count), 1)["first_s"] for _ in range(2))
        rate = length * count / seconds
        self.record("prefill", {"length": length, "count": count, "tokens_per_s": rate, "first_token_s": seconds})

    def decode(self, context: int, count: int) -> None:
        """New tokens per second of all sequences together."""
        prompts = self.prompts(context // self.shorter, count)
        self.record("decode", {"context": context, "asked": count} | self._steady(prompts, filled=True))

    def document(self, length: int, count: int) -> None:
        """The same after one text that all prompts but for their last block share, whose keys are cached."""
        (text,) = self.prompts(length // self.shorter, 1)
        self.run([text], 1)
        entry = self._steady([[*text[:-16], i, *text[-15:]] for i in range(count)], new=2 * MEASURED)
        self.record("document", {"context": length, "asked": count} | entry)

    def _steady(self, prompts: list[list[int]], *, new: int = MEASURED, filled: bool = False) -> dict[str, Any]:
        """The steps in which as many sequences run as ever fit."""
        done = self.run(prompts, new, filled=filled)
        most = max(running for _, _, running, _ in done["steps"])
        full = [step for step in done["steps"] if step[2] == most and step[3] >= most]
        full = full[len(full) // 4 :]
        if len(full) < 8:
            raise RuntimeError(
                f"all {most} sequences ran together in {len(full)} steps of {len(done['steps'])}: too few"
            )
        times = [after[0] - before[0] for before, after in pairwise(full)]
        return {
            "running": most,
            "until_all_run_s": next(step[0] for step in done["steps"] if step[2] == most),
            "tokens_per_s": (full[-1][1] - full[0][1]) / (full[-1][0] - full[0][0]),
            "step_ms_median": 1e3 * statistics.median(times),
            "step_ms_slowest": [round(1e3 * seconds, 1) for seconds in sorted(times)[-8:]],
            "steps": len(times),
        }


def identity(part: str, shape: str, gpus: int) -> dict[str, Any]:
    """What measurements in one file have in common."""
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    model = part.partition("-")[0]
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    return {"model": model, "shape": shape, "gpus": gpus, **versions, "device": device}


def measure(part: str, arguments: argparse.Namespace) -> None:
    """What decides most comes first. What fails or takes too long is noted, and tried again in the next run."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from packaging.version import Version

    output = arguments.output / f"{part}.json"
    before = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    same = identity(part, arguments.shape, arguments.gpus)
    if before and {name: before.get(name) for name in same} != same:
        raise SystemExit(f"{output} was measured elsewhere, not with {same}: move it away")
    middles = [(prompt + new // 2, clients) for prompt, new, clients in ROWS]
    plan: list[tuple[str, tuple[int, int]]] = [("prefill", (8192, 4)), ("prefill", (1024, 1))]
    plan += [("decode", middles[i]) for i in (1, 0, 3, 4, 5, 2)]
    plan += [("prefill", (1024, 32)), ("prefill", (32768, 1))]
    if part.endswith("-document"):
        plan = [("document", (DOCUMENT[0], DOCUMENT[2]))]
        if not part.startswith("softmax") and Version(same["vllm"]) < Version("0.28"):
            reason = f"vLLM {same['vllm']} takes wrong states from its prefix cache; 0.28 and later do not"
            output.write_text(json.dumps(same | {"skipped": reason}, indent=1), encoding="utf-8")
            print(part, reason)
            return
    done = [tuple(row) for row in before.get("rows", [])]
    plan = [row for row in plan if (row[0], *row[1]) not in done]
    if not plan:
        print(f"{part}: nothing left to measure")
        return
    bench = Bench(part, arguments.shape, arguments.gpus, output, json.loads(arguments.engine))
    bench.found |= {kind: before[kind] for kind in ("rows", "prefill", "decode", "document") if kind in before}
    bench.save()
    bench.run(bench.prompts(1024 // bench.shorter, 8), 8)  # compiles kernels
    for what, values in plan:
        if time.perf_counter() > BEGIN + arguments.seconds:
            print(f"{part}: no time left for {what} {values}", flush=True)
            continue
        bench.end = time.perf_counter() + arguments.row_seconds
        try:
            getattr(bench, what)(*values)
            bench.record("rows", (what, *values))
        except Exception as error:  # the others are worth having
            bench.record("failed", {"what": what, "values": values, "error": repr(error)[:500]})


def measure_all(arguments: argparse.Namespace) -> None:
    """A process for each part, which may end as it likes."""
    for part in PARTS:
        command = [sys.executable, __file__, part, "--output", str(arguments.output), "--shape", arguments.shape]
        command += ["--gpus", str(arguments.gpus)]
        command += ["--seconds", str(arguments.seconds), "--row-seconds", str(arguments.row_seconds)]
        try:
            # The last row may begin late, and the engine has to stop.
            limit = arguments.seconds + arguments.row_seconds + 60
            subprocess.run([*command, "--engine", arguments.engine], timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            print(f"{part} did not end after {limit:.0f} s", flush=True)


def bound(found: dict[str, Any], prompt: int, new: int, clients: int, texts: int) -> float:
    """Output tokens per second at most. Products of a state and of a window are not counted."""
    attention = 2 * found["softmax_heads"] * found["head_dim"] * prompt**2
    prefill_s = texts * (2 * found["products_of_a_token"] * prompt + attention) / FLOPS
    own = found["token_bytes"] * (prompt + new // 2) + found["state_bytes"]  # of a sequence
    shared = found["token_bytes"] * prompt if texts < clients else 0  # of all
    own -= shared
    gpus = found.get("gpus", 1)
    room = gpus * MEMORY_SHARE * found["memory_bytes"] - found["weights_bytes"] - shared
    together = max(1, min(clients, math.floor(room / own)))
    reads_s = (found["weights_bytes"] + shared + together * own) / BYTES_PER_S
    products_s = together * found["weights_bytes"] / FLOPS  # two operations for each weight of two bytes
    return gpus * clients * new / (prefill_s + new * clients / together * max(reads_s, products_s))


def rows(folder: Path) -> list[dict[str, Any]]:
    """Output tokens per second of each row and model, its share of the bound, and how many sequences ran at once."""
    table = []
    files = {part: folder / f"{part}.json" for part in PARTS}
    found_of = {part: json.loads(x.read_text(encoding="utf-8")) for part, x in files.items() if x.exists()}
    models = {part: found_of[part] for part in MODELS if part in found_of}
    for prompt, new, clients, texts in [(*row, row[2]) for row in ROWS] + [(*DOCUMENT, 1)]:
        row: dict[str, Any] = {"prompt": prompt, "texts": texts, "new": new, "clients": clients}
        for model, found in models.items():
            if texts < clients:
                shared = found_of.get(f"{model}-document", {})
                same = shared.get("document", [])
                if "skipped" in shared:
                    row[f"{model}, skipped"] = shared["skipped"]
            else:
                same = [
                    e for e in found.get("decode", []) if (e["context"], e["asked"]) == (prompt + new // 2, clients)
                ]
            near = [e for e in found.get("prefill", []) if texts > 1 or e["count"] == 1]
            near.sort(key=lambda e: (abs(e["length"] - prompt), -e["count"]))
            if same and near:
                decode = max(same, key=lambda e: e["context"])
                seconds = texts * prompt / near[0]["tokens_per_s"] + clients * new / decode["tokens_per_s"]
                row[model] = clients * new / seconds
                row[f"{model}, at once"] = decode["running"]
                if found["memory_bytes"]:
                    row[f"{model} / bound"] = row[model] / bound(found, prompt, new, clients, texts)
        for model in ("linear", "exact"):
            if model in row and "softmax" in row:
                row[f"{model} / softmax"] = row[model] / row["softmax"]
        table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("all", *PARTS), nargs="?", default="all")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--gpus", type=int, default=1, help="over which heads are divided")
    parser.add_argument("--output", type=Path, default=Path("build/vllm_gpu"), help="folder")
    parser.add_argument("--seconds", type=float, default=200, help="of a part, after which no row is measured")
    parser.add_argument("--row-seconds", type=float, default=60, help="of a row")
    parser.add_argument("--engine", default="{}", help="further arguments of vllm.LLM, as JSON")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.part == "all":
        measure_all(arguments)
    else:
        measure(arguments.part, arguments)
    table = arguments.output / "table.json"
    table.write_text(json.dumps(rows(arguments.output), indent=1), encoding="utf-8")
    if arguments.part == "all":
        print(table.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
