"""Decoding one sequence on the CPU: the linearized model against the softmax model it came from.

    python benchmarks/decode_cpu.py --model HuggingFaceTB/SmolLM2-135M --json benchmarks/results/decode_cpu.json

Time of single-token steps, batch 1, float32, at several positions. Nothing is generated up to there: the softmax
model's DynamicCache is filled with random keys and values of that length, and the linear model reads a few
random tokens, after which its states are told that they are that far. Neither time depends on the values. The
weights of the feature maps are those of a fresh conversion. Rounds of both models alternate, so that a busy
machine slows both; numbers are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache

from lolcats.config import AttentionSection
from lolcats.conversion import convert
from lolcats.provenance import provenance


def softmax_cache(model: Any, position: int) -> DynamicCache:
    """Random keys and values of `position` tokens in every layer."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        shape = (1, config.num_key_value_heads, position, head_dim)
        cache.update(torch.randn(shape), torch.randn(shape), layer)
    return cache


def linear_cache(model: Any, position: int) -> DynamicCache:
    """States with full windows, moved to `position`."""
    spec = model.config.spec()
    tokens = 2 * max(spec.capacity, 1) + position % max(spec.capacity, 1)  # the same place in a block
    cache = DynamicCache(config=model.config.get_text_config())
    model(torch.randint(model.config.get_text_config().vocab_size, (1, tokens)), past_key_values=cache)
    for layer in cache.layers:
        layer.state.position += position - tokens
        layer.tokens = position
    return cache


def step_ms(model: Any, cache: DynamicCache, steps: int) -> float:
    """Milliseconds of one greedy step, the mean over `steps`."""
    token = torch.tensor([[1]])
    began = time.perf_counter()
    for _ in range(steps):
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
    return 1e3 * (time.perf_counter() - began) / steps


def cache_bytes(cache: DynamicCache) -> int:
    layers: Any = cache.layers
    return sum(x.state.nbytes if hasattr(x, "state") else x.keys.nbytes + x.values.nbytes for x in layers)


@torch.inference_mode()
def measure(path: str, attention: AttentionSection, positions: list[int], steps: int, rounds: int) -> list[dict]:
    """One record per position."""
    softmax: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    linear = convert(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), attention).eval()
    records = []
    for position in positions:
        arms = {
            "linear": (linear, linear_cache(linear, position)),
            "softmax": (softmax, softmax_cache(softmax, position)),
        }
        samples: dict[str, list[float]] = {name: [] for name in arms}
        for model, cache in arms.values():  # warm up
            step_ms(model, cache, 3)
        for _ in range(rounds):
            for name, (model, cache) in arms.items():
                samples[name].append(step_ms(model, cache, steps))
        record: dict[str, Any] = {"position": position}
        for name, (_, cache) in arms.items():
            median = statistics.median(samples[name])
            record |= {
                f"{name}_ms": median,
                f"{name}_ms_min": min(samples[name]),
                f"{name}_ms_max": max(samples[name]),
                f"{name}_tokens_per_s": 1e3 / median,
                f"{name}_cache_mib": cache_bytes(cache) / 2**20,
            }
        record["speedup"] = record["softmax_ms"] / record["linear_ms"]
        records.append(record)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M")
    parser.add_argument("--positions", default="512,4096,16384")
    parser.add_argument("--window", default="terraced", choices=("terraced", "sliding"))
    parser.add_argument("--window-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=16, help="steps of one round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    attention = AttentionSection(window=given.window, window_size=given.window_size)
    positions = [int(position) for position in given.positions.split(",")]
    records = measure(given.model, attention, positions, given.steps, given.rounds)

    table = Table("position", "linear ms", "softmax ms", "linear tokens/s", "softmax tokens/s", "speedup", "cache MiB")
    for record in records:
        sizes = f"{record['linear_cache_mib']:.1f} / {record['softmax_cache_mib']:.1f}"
        columns = ("linear_ms", "softmax_ms", "linear_tokens_per_s", "softmax_tokens_per_s")
        numbers = [f"{record[name]:.1f}" for name in columns]
        table.add_row(str(record["position"]), *numbers, f"{record['speedup']:.2f}", sizes)
    Console().print(table)
    if given.json is not None:
        settings = {name: str(value) for name, value in vars(given).items() if name != "json"}
        report = {"settings": settings, "results": records, "provenance": provenance()}
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
