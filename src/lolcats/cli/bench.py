"""`lolcats bench`: how fast attention, training and decoding run on this machine."""

from __future__ import annotations

import runpy
import sys

import typer

from lolcats.cli.console import shipped_file

bench = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)
PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@bench.command(context_settings=PASSED_ON)
def attention(context: typer.Context) -> None:
    """Hybrid attention of one layer against softmax attention (flash, cuDNN), fla, and its own plain versions.

    Options: `lolcats bench attention --help`. Example:

      lolcats bench attention --shapes 1x1024,8x4096 --json attention.json
    """
    _run("attention", context.args)


@bench.command(context_settings=PASSED_ON)
def train(context: typer.Context) -> None:
    """Both training stages on a model with random weights; beside them its plain forward pass and LoRA with softmax.

    Options: `lolcats bench train --help`. Example:

      lolcats bench train --model llama3-8b --micro-batches 4,8 --json train.json
    """
    _run("train", context.args)


@bench.command(context_settings=PASSED_ON)
def decode(context: typer.Context) -> None:
    """Generation with a model of random weights: linearized, with softmax, and the device's floor.

    Options: `lolcats bench decode --help`. Example:

      lolcats bench decode --model llama3-8b --json decode.json
    """
    _run("decode", context.args)


def _run(name: str, arguments: list[str]) -> None:
    """Run the script benchmarks/NAME.py."""
    script = shipped_file(f"benchmarks/{name}.py")
    before = sys.argv, list(sys.path)
    sys.argv, sys.path = [f"lolcats bench {name}", *arguments], [str(script.parent), *sys.path]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path = before
