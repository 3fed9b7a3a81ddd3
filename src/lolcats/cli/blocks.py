"""`lolcats blocks`: attention transfer as independent jobs, one per block of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lolcats.cli.console import notes, quiet_loading_bars
from lolcats.cli.options import Model, Overrides, Recipe, Sources, config_options, resolve_for_model

HELP = """Train blocks of layers as independent jobs, on any number of machines.

prepare begins a run and writes the hidden states that every block starts from, train trains one block; then `lolcats
linearize --resume` finishes the run: exact heads by gates, and stage 2, if the configuration has them.

Examples:

  lolcats blocks prepare --recipe llama-3.1-8b --block-layers 8 --set transfer.select_by=loss -o out/

  lolcats blocks train out/ --block 2

  lolcats linearize -o out/ --resume
"""

blocks = typer.Typer(help=HELP, no_args_is_help=True)


@blocks.command()
@config_options()
def prepare(
    model: Model = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the linearized model.")] = ...,  # type: ignore[assignment]
    recipe: Recipe = None,
    data: Sources = None,
    overrides: Overrides = None,
    *,
    given: dict[str, Any],
) -> None:
    """Pass the data through the original model once and write the inputs of every block.

    Repeat a call that was preempted with the same options: it resumes.
    """
    config = resolve_for_model(given, model=model, data=data, recipe=recipe, overrides=overrides)
    quiet_loading_bars()
    from lolcats.parallel.blockwise import jobs

    jobs.prepare(config, output, notes())


@blocks.command()
def train(
    folder: Annotated[Path, typer.Argument(help="Folder that `prepare` made.")],
    block: Annotated[int, typer.Option("--block", "-b", min=0, help="Number of the block.")],
    device: Annotated[str | None, typer.Option("--device", help="In place of the configuration's.")] = None,
) -> None:
    """Train one block, or resume its training; blocks do not wait for one another."""
    quiet_loading_bars()
    from lolcats.parallel.blockwise import jobs

    jobs.train_one(folder, block, notes(), device=device)
