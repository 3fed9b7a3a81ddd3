"""Speed of vLLM on one GPU or several: its softmax model, ours with linear heads alone, and with some exact heads.

    python benchmarks/vllm_gpu.py --output build/vllm_gpu         # all models, one process after another
    python benchmarks/vllm_gpu.py exact --output build/vllm_gpu   # one
    python benchmarks/vllm_gpu.py linear --shape 405b --gpus 8 --output build/vllm_405b

Each writes a file after each of its rows; no row takes longer than `--row-seconds`, and none begins after `--seconds`.
What the files have already is not measured again, so that a run that was cut off can be repeated.

Random weights in the shape of a Llama 3, of 8B by default, which vLLM makes itself; with `--gpus` tensor parallel.
Prefill is measured on prompts, decoding over contexts that vLLM's DecodeBenchConnector declares read, so that no time
goes into them. CUDA graphs for decoding, no torch.compile.
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
# What decides most comes first: (tokens of a prompt, prompts) and (context, sequences).
ROWS = [
    *(("prefill", 8192, 4), ("prefill", 1024, 1)),
    *(("decode", 1280, 256), ("decode", 1280, 1), ("decode", 33024, 128), ("decode", 5120, 512)),
    *(("decode", 10240, 256), ("decode", 8448, 256), ("prefill", 1024, 32), ("prefill", 32768, 1)),
]
SHORTER = {"tiny": 64}  # contexts are divided by this
MEASURED = 88  # new tokens of a sequence that are measured: more than a window's block, so that one leaves
MODELS = ("softmax", "linear", "exact")
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
    exact = [layer for layer in layers if not hasattr(layer, "parts")]
    return {
        "softmax_heads": sum(layer.num_heads for layer in exact),
        "state_bytes": sum(x.nbytes for layer in layers for x in getattr(layer, "parts", {}).values()),
        "token_bytes": sum(4 * layer.num_kv_heads * layer.head_size for layer in exact),
        "backends": sorted({layer.get_attn_backend().get_name() for layer in layers}),
    }


class Bench:
    """An engine in this process, and what was measured, written to a file after each measurement."""

    def __init__(self, model: str, shape: str, gpus: int, output: Path, more: dict[str, Any]) -> None:
        from vllm import LLM

        self.output, self.shorter, self.end = output, SHORTER.get(shape, 1), math.inf
        self.found: dict[str, Any] = identity(model, shape, gpus)
        path = make_folder(model, shape, Path(tempfile.mkdtemp()))
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "tensor_parallel_size": gpus,
            "skip_tokenizer_init": True,
            "max_model_len": 33280 // self.shorter + MEASURED,
            "max_num_seqs": 512,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": 0.92,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 8, 32, 64, 104, 128, 176, 256, 512],
            },
            "kv_transfer_config": {
                "kv_connector": "DecodeBenchConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"fill_mean": 0.015},
            },
        }
        self.llm = LLM(str(path), **(settings | more))
        self.engine: Any = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.filled, self.round = False, 0
        connector = self.scheduler.connector
        match = connector.get_num_new_matched_tokens
        connector.get_num_new_matched_tokens = lambda *args: match(*args) if self.filled else (0, False)
        self.found |= {"settings": settings | more, "start_s": time.perf_counter() - BEGIN}
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        config = self.engine.vllm_config
        self.found |= self.llm.collective_rpc(prepare)[0] | {
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
        self.record("decode", {"context": context, "asked": count} | self._steady(prompts))

    def _steady(self, prompts: list[list[int]]) -> dict[str, Any]:
        """The steps in which as many sequences run as ever fit."""
        done = self.run(prompts, MEASURED, filled=True)
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


def identity(model: str, shape: str, gpus: int) -> dict[str, Any]:
    """What measurements in one file have in common."""
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    return {"model": model, "shape": shape, "gpus": gpus, **versions, "device": device}


def measure(model: str, arguments: argparse.Namespace) -> None:
    """What fails or takes too long is noted, and tried again in the next run."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    output = arguments.output / f"{model}.json"
    before = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    same = identity(model, arguments.shape, arguments.gpus)
    if before and {name: before.get(name) for name in same} != same:
        raise SystemExit(f"{output} was measured elsewhere, not with {same}: move it away")
    plan = [row for row in ROWS if list(row) not in before.get("rows", [])]
    if not plan:
        print(f"{model}: nothing left to measure")
        return
    bench = Bench(model, arguments.shape, arguments.gpus, output, json.loads(arguments.engine))
    bench.found |= {kind: before[kind] for kind in ("rows", "prefill", "decode") if kind in before}
    bench.save()
    bench.run(bench.prompts(1024 // bench.shorter, 8), 8)  # compiles kernels
    for row in plan:
        if time.perf_counter() > BEGIN + arguments.seconds:
            print(f"{model}: no time left for {row}", flush=True)
            continue
        bench.end = time.perf_counter() + arguments.row_seconds
        try:
            getattr(bench, row[0])(*row[1:])
            bench.record("rows", row)
        except Exception as error:  # the others are worth having
            bench.record("failed", {"row": row, "error": repr(error)[:500]})


def measure_all(arguments: argparse.Namespace) -> None:
    """A process for each model, which may end as it likes."""
    for model in MODELS:
        command = [sys.executable, __file__, model, "--output", str(arguments.output), "--shape", arguments.shape]
        command += ["--gpus", str(arguments.gpus)]
        command += ["--seconds", str(arguments.seconds), "--row-seconds", str(arguments.row_seconds)]
        try:
            # The last row may begin late, and the engine has to stop.
            limit = arguments.seconds + arguments.row_seconds + 60
            subprocess.run([*command, "--engine", arguments.engine], timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            print(f"{model} did not end after {limit:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("all", *MODELS), nargs="?", default="all")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--gpus", type=int, default=1, help="over which heads are divided")
    parser.add_argument("--output", type=Path, default=Path("build/vllm_gpu"), help="folder")
    parser.add_argument("--seconds", type=float, default=200, help="of a model, after which no row is measured")
    parser.add_argument("--row-seconds", type=float, default=60, help="of a row")
    parser.add_argument("--engine", default="{}", help="further arguments of vllm.LLM, as JSON")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.model == "all":
        measure_all(arguments)
    else:
        measure(arguments.model, arguments)


if __name__ == "__main__":
    main()
