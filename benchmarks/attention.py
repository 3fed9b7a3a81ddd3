"""Hybrid attention against SDPA (flash, cuDNN), fla, and its own plain implementations.

    python benchmarks/attention.py --json benchmarks/results/attention_h200.json
    python benchmarks/attention.py --shapes 1x1024,8x4096 --modes forward,train --implementations triton,sdpa_cudnn
    python benchmarks/attention.py --ragged 32x32768 --modes forward,train --json benchmarks/results/ragged_h200.json

Without a GPU it runs small shapes. Calls are replayed CUDA graphs over rotating inputs, so that they show the
kernels; `--eager` times them with the host's launches.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from lolcats.bench.attention import IMPLEMENTATIONS, MODES, AttentionBench, print_table, profile, run, save
from lolcats.bench.ragged import run_ragged
from lolcats.config.attention import AttentionConfig
from lolcats.provenance import provenance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="", help="batch x tokens, comma-separated: 1x1024,16x4096")
    parser.add_argument("--implementations", default=",".join(IMPLEMENTATIONS))
    parser.add_argument("--modes", default=",".join(MODES))
    for name, default in (("heads", 32), ("kv-heads", 8), ("head-dim", 128), ("feature-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--share-state", default="kv_head", choices=("kv_head", "query_head"))
    parser.add_argument("--window", default="terraced", choices=("terraced", "sliding"))
    parser.add_argument("--window-size", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--sinks", type=int, default=0)
    parser.add_argument("--feature-map", default="hedgehog")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device")
    parser.add_argument("--budget-s", type=float, default=1.0, help="seconds of measuring per number")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--profile", action="store_true", help="instead: milliseconds of every kernel of triton")
    parser.add_argument("--ragged", help="instead: sequences x tokens in all, lengths lognormal, packed")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()

    feature_map = None if given.feature_map == "none" else given.feature_map
    bench = AttentionBench(
        shapes=tuple((int(b), int(t)) for b, t in (pair.split("x") for pair in given.shapes.split(",") if pair)),
        implementations=tuple(given.implementations.split(",")),
        modes=tuple(given.modes.split(",")),
        heads=given.heads,
        kv_heads=given.kv_heads,
        head_dim=given.head_dim,
        feature_dim=given.feature_dim,
        share_state=given.share_state,
        spec=AttentionConfig(given.window, given.window_size, given.blocks, given.sinks, feature_map),
        dtype=given.dtype,
        device=given.device or AttentionBench.device,
        budget_s=given.budget_s,
        capture=not given.eager,
    )
    console = Console(width=200)
    if given.profile:
        for batch, tokens in bench.shapes:
            for mode in bench.modes:
                console.print(f"{batch} x {tokens} {mode}")
                for name, milliseconds in profile(bench, batch, tokens, mode).items():
                    console.print(f"  {milliseconds:9.4f} ms  {name[:120]}", highlight=False)
        return

    def keep(report: dict[str, Any]) -> None:
        if given.json is not None:
            save(report, given.json)

    if given.ragged is not None:
        sequences, tokens = (int(number) for number in given.ragged.split("x"))
        rows = run_ragged(bench, sequences, tokens, console)
        keep({"settings": asdict(bench), "provenance": provenance(), "rows": rows})
    else:
        print_table(run(bench, console, keep), console)


if __name__ == "__main__":
    main()
