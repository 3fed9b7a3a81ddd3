"""`lolcats bench`: how fast attention, training and decoding run on this machine."""

from __future__ import annotations

import typer

bench = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)
PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@bench.command(context_settings=PASSED_ON)
def attention(context: typer.Context) -> None:
    """Hybrid attention of one layer against softmax attention (flash, cuDNN), fla, and its own plain versions.

    Options: `lolcats bench attention --help`. Example:

      lolcats bench attention --shapes 1x1024,8x4096 --json attention.json
    """
    from lolcats.bench import attention as benchmark
    from lolcats.bench.command import measure

    measure(benchmark, benchmark.AttentionBench(), context.args, "lolcats bench attention")


@bench.command(context_settings=PASSED_ON)
def train(context: typer.Context) -> None:
    """Both training stages on a model with random weights; beside them its plain forward pass and LoRA with softmax.

    Options: `lolcats bench train --help`. Example:

      lolcats bench train --model llama3-8b --micro-batches 4,8 --json train.json
    """
    from lolcats.bench import train as benchmark
    from lolcats.bench.command import measure

    measure(benchmark, benchmark.TrainBench(), context.args, "lolcats bench train")


@bench.command(context_settings=PASSED_ON)
def decode(context: typer.Context) -> None:
    """Generation with a model of random weights: linearized, with softmax, and the device's floor.

    Options: `lolcats bench decode --help`. Example:

      lolcats bench decode --model llama3-8b --json decode.json
    """
    from lolcats.bench import decode as benchmark
    from lolcats.bench.command import measure

    measure(benchmark, benchmark.DecodeBench(), context.args, "lolcats bench decode")
