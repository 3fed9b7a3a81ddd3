"""Decoding: throughput and memory over batch sizes, latency over positions, prefill, a very long sequence.

    python benchmarks/decode.py --model llama3-8b --json benchmarks/results/decode_h200.json --plot decode.png
    python benchmarks/decode.py --profile 512
    python benchmarks/decode.py --sections throughput --batches 512 --full-run-batch 512 --seconds 400
    python benchmarks/decode.py --model smollm2-135m --sections prefill,latency --attention sparse_cache=128

Every field of `DecodeBench` is an option; lists have commas. Weights are random. Without a GPU it runs a tiny model.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from lolcats.bench.attention import save
from lolcats.bench.decode import DecodeBench, print_table, run
from lolcats.bench.decode_plot import plot
from lolcats.bench.decode_profile import profile_step
from lolcats.config import parse_override
from lolcats.config.attention import AttentionConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {item.name: getattr(DecodeBench(), item.name) for item in fields(DecodeBench)}
    del defaults["attention"]
    for name, default in defaults.items():
        shown = ",".join(str(entry) for entry in default) if isinstance(default, tuple) else default
        kind: Any = str if isinstance(default, tuple) else type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=shown, help=f"default: {shown}")
    parser.add_argument(
        "--attention", action="append", default=[], metavar="FIELD=VALUE", help="of AttentionConfig; repeatable"
    )
    parser.add_argument("--json", type=Path, help="rewritten after every row")
    parser.add_argument("--plot", type=Path, help="PNG")
    parser.add_argument("--profile", type=int, metavar="BATCH", help="instead: milliseconds of every kernel of a step")
    given = vars(parser.parse_args())
    fields_given = [parse_override(f"attention.{text}")["attention"] for text in given["attention"]]
    given["attention"] = AttentionConfig(**{name: value for pair in fields_given for name, value in pair.items()})
    as_json, picture, batch = given.pop("json"), given.pop("plot"), given.pop("profile")
    for name, default in defaults.items():
        if isinstance(default, tuple):
            kind = type(default[0])
            given[name] = tuple(kind(entry) for entry in given[name].split(","))
    console = Console(width=200)
    if batch is not None:
        for name, milliseconds in profile_step(DecodeBench(**given), batch, console).items():
            console.print(f"  {milliseconds:9.4f} ms  {name[:120]}", highlight=False)
        return
    report = run(DecodeBench(**given), console, lambda found: None if as_json is None else save(found, as_json))
    print_table(report, console)
    if picture is not None:
        plot(report, picture)


if __name__ == "__main__":
    main()
