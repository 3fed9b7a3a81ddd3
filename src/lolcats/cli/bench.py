"""`lolcats bench`: how fast attention, training and decoding run on this machine."""

from __future__ import annotations

import runpy
import sys

import typer

from lolcats.cli.console import shipped_file

bench = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)
SCRIPTS = {
    "attention": "Hybrid attention of one layer against softmax attention (flash, cuDNN), fla, and its own plain"
    " versions.",
    "train": "Both training stages on a model with random weights; beside them its plain forward pass and LoRA with"
    " softmax.",
    "decode": "Generation with a model of random weights: linearized, and with softmax.",
}
PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def _run(context: typer.Context) -> None:
    """Run the script benchmarks/COMMAND.py."""
    script = shipped_file(f"benchmarks/{context.info_name}.py")
    before = sys.argv, list(sys.path)
    sys.argv, sys.path = [f"lolcats bench {context.info_name}", *context.args], [str(script.parent), *sys.path]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path = before


for _name, _about in SCRIPTS.items():
    _text = f"{_about}\n\nOptions: `lolcats bench {_name} --help`."
    bench.command(_name, help=_text, context_settings=PASSED_ON)(_run)
