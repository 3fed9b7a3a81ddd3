"""Speed of vLLM on one GPU: its softmax model, ours with linear heads alone, and with some exact heads.

    python benchmarks/vllm_gpu.py softmax --output softmax.json
    python benchmarks/vllm_gpu.py linear --output linear.json
    python benchmarks/vllm_gpu.py exact --output exact.json
    python benchmarks/vllm_gpu.py rows softmax.json linear.json exact.json

Random weights in the shape of Llama-3-8B, which vLLM makes itself. Prefill is measured on prompts, decoding over
contexts that vLLM's DecodeBenchConnector declares read, so that no time goes into them. `rows` puts both together: the
time of a row is that of its prompts' tokens, and then of its new ones at the speed of the middle of the answer with as
many sequences as fit at once. No prefix caching. CUDA graphs for decoding, no torch.compile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

SHAPES = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
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
SHORTER = {"tiny": 64}  # contexts are divided by this


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
        count = round(EXACT_SHARE * kv_heads * layers) if model == "exact" else 0
        heads = tuple(f"{i % layers}.{(3 * i + i // layers) % kv_heads}" for i in range(count))
        with torch.device("meta"):
            base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            config = convert(base, AttentionConfig(exact=heads)).config
        config.architectures = ["LolcatsForCausalLM"]
        config.dtype = torch.bfloat16
    config.save_pretrained(path)
    return path


class Bench:
    """An engine in this process, and what was measured, written to a file after each measurement."""

    def __init__(self, model: str, shape: str, output: Path, more: dict[str, Any]) -> None:
        import torch
        import vllm
        from vllm import LLM

        self.output, self.shorter = output, SHORTER.get(shape, 1)
        self.found: dict[str, Any] = {
            "model": model,
            "shape": shape,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
        }
        if torch.cuda.is_available():
            self.found["device"] = torch.cuda.get_device_name()
        begin = time.perf_counter()
        path = make_folder(model, shape, Path(tempfile.mkdtemp()))
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 34816 // self.shorter,
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
        if connector is not None:
            from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector

            match = connector.get_num_new_matched_tokens
            connector.get_num_new_matched_tokens = lambda *args: match(*args) if self.filled else (0, False)
            # It would fill all states again for each request; all of the cache is filled here, once.
            decode_bench_connector.DecodeBenchConnectorWorker.start_fill_kv = lambda *_: None
            self._fill()
        self.found["settings"] = settings | more
        self.found["start_s"] = time.perf_counter() - begin
        self.found["kv_cache_tokens"] = self._cache_tokens()
        self.found["backends"] = self._backends()
        self.save()

    def _fill(self) -> None:
        """The whole cache with bytes that make 0.0115 in bfloat16 and float32."""
        import torch

        for layer in self.engine.vllm_config.compilation_config.static_forward_context.values():
            held = getattr(layer, "kv_cache", ())
            for tensor in [held] if isinstance(held, torch.Tensor) else held:
                if tensor.numel():
                    torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).fill_(60)

    def _cache_tokens(self) -> Any:
        config = self.engine.vllm_config.cache_config
        return {name: getattr(config, name, None) for name in ("num_gpu_blocks", "block_size", "mamba_block_size")}

    def _backends(self) -> dict[str, int]:
        """How many layers have each attention backend."""
        layers = self.engine.vllm_config.compilation_config.static_forward_context.values()
        names = [layer.get_attn_backend().get_name() for layer in layers]
        return {name: names.count(name) for name in sorted(set(names))}

    def save(self) -> None:
        self.output.write_text(json.dumps(self.found, indent=1, default=str), encoding="utf-8")

    def run(self, length: int, count: int, new: int, *, filled: bool) -> dict[str, Any]:
        """`count` requests of `length` random tokens; with `filled` only the last of them is computed."""
        from vllm import SamplingParams

        self.filled = filled
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        self.round += 1
        for i in range(count):
            # The first tokens differ from request to request.
            prompt = [(17 * self.round + 31 * i + 7 * j) % 997 for j in range(length)]
            self.engine.add_request(f"{self.round}-{i}", {"prompt_token_ids": prompt}, sampling)
        begin = time.perf_counter()
        steps: list[tuple[float, int, int, int]] = []  # time at the end, new tokens in all, running, begun to answer
        tokens, first, seen = 0, {}, {}
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter() - begin
            for output in outputs:
                have = len(output.outputs[0].token_ids)
                tokens += have - seen.get(output.request_id, 0)
                seen[output.request_id] = have
                first.setdefault(output.request_id, now)
            steps.append((now, tokens, len(self.scheduler.running), len(first)))
            if filled and len(steps) > 4 * new + 2 * count:
                break
            if filled and max(seen.values(), default=0) >= new - 1:  # the first ones end: nothing is steady any more
                break
        unfinished = [f"{self.round}-{i}" for i in range(count)]
        self.engine.abort_request(unfinished)
        for _ in range(3):
            if self.engine.has_unfinished_requests():
                self.engine.step()
        return {"steps": steps, "first": sorted(first.values()), "seconds": steps[-1][0], "tokens": tokens}

    def prefill(self, length: int, count: int) -> None:
        """Tokens per second of prompts, and the time to the first token."""
        length //= self.shorter
        done = self.run(length, count, 1, filled=False)
        rate = length * count / done["first"][-1]
        entry = {"length": length, "count": count, "tokens_per_s": rate, "first_token_s": done["first"][-1]}
        self.found.setdefault("prefill", []).append(entry)
        print(self.found["model"], "prefill", entry, flush=True)
        self.save()

    def decode(self, context: int, count: int, new: int = 88) -> None:
        """New tokens per second of all sequences together, from the steps in which as many run as ever fit.

        They are more than a window's block, so that one leaves in some step.
        """
        length = context // self.shorter
        done = self.run(length, count, new, filled=True)
        most = max(running for _, _, running, _ in done["steps"])
        full = [step for step in done["steps"] if step[2] == most and step[3] >= most]
        full = full[len(full) // 4 :]
        times = [after[0] - before[0] for before, after in pairwise(full)]
        rate = (full[-1][1] - full[0][1]) / (full[-1][0] - full[0][0])
        entry = {
            "context": context,
            "asked": count,
            "running": most,
            "tokens_per_s": rate,
            "step_ms_median": 1e3 * statistics.median(times),
            "steps": len(times),
        }
        self.found.setdefault("decode", []).append(entry)
        print(self.found["model"], "decode", entry, flush=True)
        self.save()


def measure(arguments: argparse.Namespace) -> None:
    bench = Bench(arguments.model, arguments.shape, arguments.output, json.loads(arguments.engine))
    plan: list[tuple[str, tuple[int, ...]]] = [("prefill", (1024, 8))]
    plan += [("decode", (prompt + new // 2, clients)) for prompt, new, clients in ROWS[:2]]
    plan += [("prefill", (1024, 1)), ("prefill", (8192, 1)), ("prefill", (1024, 32)), ("prefill", (8192, 8))]
    plan += [("decode", (ROWS[i][0] + ROWS[i][1] // 2, ROWS[i][2])) for i in (4, 3, 2, 5)]
    plan += [("prefill", (32768, 1)), ("prefill", (32768, 2)), ("decode", (32768, 512))]
    for what, values in plan:
        try:
            getattr(bench, what)(*values)
        except Exception as error:  # the others are worth having
            bench.found.setdefault("failed", []).append([what, values, repr(error)[:500]])
            print("FAILED", what, values, repr(error)[:2000], flush=True)
            bench.save()
    bench.found["complete"] = True
    bench.save()


def rows(files: list[Path]) -> list[dict[str, Any]]:
    """Output tokens per second of each row and model."""
    table = []
    for prompt, new, clients in ROWS:
        row: dict[str, Any] = {"prompt": prompt, "new": new, "clients": clients}
        for file in files:
            found = json.loads(file.read_text(encoding="utf-8"))
            same = [e for e in found.get("decode", []) if (e["context"], e["asked"]) == (prompt + new // 2, clients)]
            near = [e for e in found.get("prefill", []) if clients > 1 or e["count"] == 1]
            near.sort(key=lambda e: (abs(e["length"] - prompt), -e["count"]))
            if same and near:
                seconds = clients * prompt / near[0]["tokens_per_s"] + clients * new / same[0]["tokens_per_s"]
                row[found["model"]] = clients * new / seconds
        for model in ("linear", "exact"):
            if model in row and "softmax" in row:
                row[f"{model} / softmax"] = row[model] / row["softmax"]
        table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("softmax", "linear", "exact", "rows"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--output", type=Path, default=Path("vllm_gpu.json"))
    parser.add_argument("--engine", default="{}", help="further arguments of vllm.LLM, as JSON")
    arguments = parser.parse_args()
    if arguments.model == "rows":
        arguments.output.write_text(json.dumps(rows(arguments.files), indent=1), encoding="utf-8")
        print(arguments.output.read_text(encoding="utf-8"))
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
