"""Training speed and memory of both stages, beside the frozen model's forward pass and LoRA with softmax.

    python benchmarks/train.py --model llama3-8b --micro-batches 4,8 --json benchmarks/results/train_h200.json
    python benchmarks/train.py --model smollm2-135m --rows transfer --profile

Weights are random. Without a GPU it runs a tiny model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from lolcats.bench.attention import save
from lolcats.bench.models import SHAPES
from lolcats.bench.train import ROWS, TrainBench, print_table, profile, run
from lolcats.config.attention import AttentionConfig

KERNELS_SHOWN = 40


def main() -> None:
    defaults = TrainBench()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=defaults.model, choices=tuple(SHAPES))
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--micro-batches", default=",".join(str(size) for size in defaults.micro_batches))
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of an optimizer update")
    parser.add_argument("--tokens", type=int, default=defaults.tokens, help="of a sequence")
    parser.add_argument("--label-share", type=float, default=1.0, help="share of the tokens that are labels")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--sinks", type=int, default=0, help="1: lolcats-plus")
    parser.add_argument("--train-feature-maps", action="store_true", help="in stage 2 as well: lolcats-plus")
    parser.add_argument(
        "--position-offset", type=int, default=0, help="with one jump; 7168 at 1024 tokens: lolcats-plus"
    )
    parser.add_argument("--lora-rank", type=int, default=8)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--no-fused-kernels", action="store_true")
    parser.add_argument("--no-cuda-graphs", action="store_true")
    parser.add_argument("--dtype", default=defaults.dtype, choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default=defaults.device)
    parser.add_argument("--profile", action="store_true", help="instead: milliseconds of every kernel in one step")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    bench = TrainBench(
        model=given.model,
        rows=tuple(given.rows.split(",")),
        micro_batches=tuple(int(size) for size in given.micro_batches.split(",")),
        accumulate=given.accumulate,
        tokens=given.tokens,
        label_share=given.label_share,
        steps=given.steps,
        attention=AttentionConfig(sinks=given.sinks),
        lora_rank=given.lora_rank,
        train_feature_maps=given.train_feature_maps,
        position_offset=given.position_offset,
        gradient_checkpointing=given.gradient_checkpointing,
        fused_kernels="off" if given.no_fused_kernels else "auto",
        cuda_graphs="off" if given.no_cuda_graphs else "auto",
        dtype=given.dtype,
        device=given.device,
    )
    console = Console(width=200)
    if given.profile:
        for micro_batch in bench.micro_batches:
            for row in bench.rows:
                found = profile(bench, row, micro_batch, console)
                head = f"{row}, {micro_batch} x {bench.tokens}: host {found['host_ms']:.2f} ms a step"
                console.print(f"{head}, kernels {found['kernels_ms']:.2f} ms", highlight=False)
                for kernel in found["kernels"][:KERNELS_SHOWN]:
                    line = f"  {kernel['ms']:9.3f} ms  {kernel['calls']:7.0f} calls  {kernel['name'][:140]}"
                    console.print(line, highlight=False, markup=False)
        return
    report = run(bench, console, lambda found: None if given.json is None else save(found, given.json))
    print_table(report, console)


if __name__ == "__main__":
    main()
