"""Tokens/s and memory of both stages over several GPUs of one or more machines, started by torchrun.

    torchrun --nproc-per-node 4 benchmarks/scaling.py --model llama3-70b --micro-batches 2 --json 70b.json
    torchrun --nproc-per-node 4 benchmarks/scaling.py --model smollm2-135m --no-shard --micro-batches 8
    python benchmarks/scaling.py --model llama3-405b --layers 9 --rows transfer --micro-batches 8

Weights are random and made on the device that holds them. Tokens/s are of all processes together. Without a GPU it
runs a tiny model.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from lolcats.bench.attention import save
from lolcats.bench.models import SHAPES
from lolcats.bench.scaling import ScalingBench, run
from lolcats.bench.train import TrainBench
from lolcats.parallel.launch import open_group


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
        keep = partial(save, path=given.json) if writes else lambda report: None
        run(bench, group, Console(width=200, quiet=not group.is_main), keep)


if __name__ == "__main__":
    main()
