"""`lolcats linearize`: a pretrained model in, a linearized one out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lolcats.cli.console import notes, quiet_loading_bars
from lolcats.cli.options import Model, Overrides, Recipe, Sources, config_options, resolve_for_model
from lolcats.errors import UserError


@config_options()
def linearize(
    model: Model = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the linearized model.")] = None,
    recipe: Recipe = None,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the interrupted run in OUTPUT, with its configuration.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin again in a folder that is not empty; deletes nothing.")
    ] = False,
    transfer_from: Annotated[
        Path | None,
        typer.Option(
            "--transfer-from", help="Take stage 1 (and the gates) from the folder of a run with the same settings."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration as YAML and stop.")
    ] = False,
    data: Sources = None,
    *,
    given: dict[str, Any],
) -> None:
    """Replace a model's softmax attention by linear attention and train it to match.

    Stage 1 (attention transfer) trains the feature maps to reproduce each softmax attention's output.

    Stage 2 (low-rank adjusting) trains LoRA adapters to match the original's distribution, or the data's tokens.

    OUTPUT becomes a Hugging Face folder; its run/ folder holds configuration and checkpoints.

    Examples:

      lolcats linearize HuggingFaceTB/SmolLM2-135M-Instruct --data yahma/alpaca-cleaned -o out/

      lolcats linearize --recipe llama-3.1-8b -o out/

      lolcats linearize my-model/ --data chat.jsonl,weight=3 --data books.jsonl --exact 0-3 -o out/

      lolcats linearize -o out/ --resume
    """
    saved = None
    if resume and recipe is None and model is None:
        if output is None:
            raise UserError("--resume needs the folder of the run: give --output (-o)")
        saved = output / "run" / "config.yaml"
        if not saved.is_file():
            raise UserError(f"nothing to resume: {saved} does not exist; give a model or a recipe to start a run")
    config = resolve_for_model(given, model=model, data=data, recipe=recipe, overrides=overrides, saved=saved)
    if dry_run:
        typer.echo(config.to_yaml(), nl=False)
        return
    if output is None:
        raise UserError("no output folder: give --output (-o), for example -o out/")
    quiet_loading_bars()
    from lolcats import pipeline

    how: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "transfer_from": transfer_from}
    pipeline.linearize(config, output, **how, console=notes())
