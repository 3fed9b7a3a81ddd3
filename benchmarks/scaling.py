"""Tokens/s and memory of both stages over several GPUs of one or more machines, started by torchrun.

    torchrun --nproc-per-node 4 benchmarks/scaling.py --model llama3-70b --micro-batches 2 --json 70b.json
    torchrun --nproc-per-node 4 benchmarks/scaling.py --model smollm2-135m --no-shard --micro-batches 8
    python benchmarks/scaling.py --model llama3-405b --layers 9 --rows transfer --micro-batches 8

Weights are random and made on the device that holds them. Tokens/s are of all processes together. Without a GPU it
runs a tiny model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from bench_tools import (
    check_shape,
    free,
    memory_gib,
    quantile,
    saver,
    settings_json,
    shape_config,
    step_samples,
    synchronize,
)
from rich.console import Console
from torch import Tensor
from train import TrainBench, updates
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from lolcats.conversion import convert
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.group import Group
from lolcats.parallel.launch import open_group
from lolcats.parallel.sharding import fill, place_replicated, shard
from lolcats.plan.known_shapes import SHAPES
from lolcats.provenance import provenance
from lolcats.training.graphs import WARM_UP
from lolcats.training.optim import local_part

DEVIATION = 0.02  # of random weights: activations stay finite in any depth


@dataclass(frozen=True)
class ScalingBench:
    """What to measure; `train` says the rest."""

    train: TrainBench
    layers: int | None = None  # None: all of the shape's; fewer keep each layer's shape
    seconds: float = 30.0  # of measured steps
    sharded: bool = True
    cpu_offload: bool = False


def run(
    bench: ScalingBench,
    group: Group,
    console: Console,
    keep: Callable[[dict[str, Any]], object] = lambda report: None,
) -> dict[str, Any]:
    """Measure every row at every micro-batch size; all processes call this and get the same report.

    Args:
        keep: gets the report after every row, so that an interrupted run loses nothing.
    """
    check_shape(bench.train.model)
    rows: list[dict[str, Any]] = []
    report = {"settings": settings_json(bench), "processes": group.world, "provenance": provenance(), "rows": rows}
    for micro_batch in bench.train.micro_batches:
        for name in bench.train.rows:
            row: dict[str, Any] = {"row": name, "micro_batch": micro_batch, "tokens": bench.train.tokens}
            try:
                row |= _measure(bench, name, micro_batch, group, console)
            except torch.OutOfMemoryError as error:
                row["error"] = str(error).splitlines()[0][:200]
            rows.append(row)
            keep(report)
            console.print(str(row), highlight=False)
            if any(group.gather("error" in row)):
                break  # the ranks that had room wait in a collective of this row; nothing can follow it
    return report


def build_sharded(bench: ScalingBench, group: Group) -> LolcatsForCausalLM:
    """A linearized model with random weights; every process makes only its share of them."""
    device = group.device or torch.device(bench.train.device)
    config = shape_config(bench.train.model, bench.train.tokens, bench.layers, use_cache=False)
    with init_empty_weights(include_buffers=False), no_init_weights():
        base = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, bench.train.dtype))
    base.tie_weights()
    model = convert(base.eval(), bench.train.attention)
    place_replicated(model, device)
    tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
    if group.world > 1 and bench.sharded:
        shard(model, group, cpu_offload=bench.cpu_offload)

    def random(name: str, parameter: Tensor) -> Tensor:
        part = torch.empty(local_part(parameter).shape, dtype=parameter.dtype, device=device)
        return part.fill_(1.0) if parameter.dim() == 1 else part.normal_(0.0, DEVIATION)

    fill(model, random, device, cpu_offload=bench.cpu_offload)
    if tied:
        base.get_output_embeddings().weight = base.get_input_embeddings().weight
    return model


def _measure(bench: ScalingBench, name: str, micro_batch: int, group: Group, console: Console) -> dict[str, Any]:
    device = group.device or torch.device(bench.train.device)
    free(device)
    with updates(
        bench.train, name, micro_batch, console, group=group, build=lambda _: build_sharded(bench, group)
    ) as step:
        for _ in range(WARM_UP + 1):
            step()
        synchronize(device)
        begin_s = time.perf_counter()
        step()
        synchronize(device)
        once_s = group.broadcast(time.perf_counter() - begin_s)  # all ranks make equally many steps
        samples_ms = step_samples(step, max(3, min(1000, int(bench.seconds / once_s))), device)
    ordered = sorted(samples_ms)
    median_ms = group.broadcast(ordered[len(ordered) // 2])
    tokens = micro_batch * bench.train.accumulate * group.world * bench.train.tokens
    memory = group.gather(memory_gib(device))
    return {
        "tokens_per_second": tokens / median_ms * 1e3,
        "step_ms": median_ms,
        "step_ms_p10": quantile(ordered, 0.1),
        "step_ms_p90": quantile(ordered, 0.9),
        "steps": len(samples_ms),
        "peak_gib": [rank["peak_gib"] for rank in memory],
        "reserved_gib": [rank["reserved_gib"] for rank in memory],
    }


def main() -> None:
    defaults = TrainBench()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=defaults.model, choices=tuple(SHAPES))
    parser.add_argument("--layers", type=int, help="decoder layers; default: all of the shape's")
    parser.add_argument("--rows", default="transfer,adjust")
    parser.add_argument("--micro-batches", default=",".join(str(size) for size in defaults.micro_batches))
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of each process in an update")
    parser.add_argument("--tokens", type=int, default=defaults.tokens, help="of a sequence")
    parser.add_argument("--seconds", type=float, default=30.0, help="of measured steps, for each row")
    parser.add_argument("--lora-rank", type=int, default=8)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--no-shard", action="store_true", help="every process holds the whole model")
    parser.add_argument("--cpu-offload", action="store_true", help="shares of the weights in CPU memory")
    parser.add_argument("--no-fused-kernels", action="store_true")
    parser.add_argument("--dtype", default=defaults.dtype, choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    bench = ScalingBench(
        train=TrainBench(
            model=given.model,
            rows=tuple(given.rows.split(",")),
            micro_batches=tuple(int(size) for size in given.micro_batches.split(",")),
            accumulate=given.accumulate,
            tokens=given.tokens,
            lora_rank=given.lora_rank,
            gradient_checkpointing=given.gradient_checkpointing,
            fused_kernels="off" if given.no_fused_kernels else "auto",
            dtype=given.dtype,
            device=given.device,
        ),
        layers=given.layers,
        seconds=given.seconds,
        sharded=not given.no_shard,
        cpu_offload=given.cpu_offload,
    )
    with open_group(given.device) as group:
        writes = group.is_main and given.json is not None
        keep = saver(given.json if writes else None)
        run(bench, group, Console(width=200, quiet=not group.is_main), keep)


if __name__ == "__main__":
    main()
