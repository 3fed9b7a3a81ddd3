"""`lolcats import`: a model that the paper's published code trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lolcats.cli.console import notes, quiet_loading_bars


def import_published(
    weights: Annotated[
        list[str],
        typer.Argument(help="The run's tensors: .pt or .safetensors files, folders or hub ids; of both stages."),
    ],
    config: Annotated[
        list[Path],
        typer.Option(
            help="The run's YAML or JSON: the model's, with LoRA also that of stage 2 or adapter_config.json."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder for the model.")],
    model: Annotated[
        str | None, typer.Option(help="Base model: hub id or folder (default: as the configuration says).")
    ] = None,
) -> None:
    """Make a folder of a model that the paper's published code trained.

    Its tensors and configurations in; base model, feature maps and merged LoRA out, as `lolcats linearize` writes them.

    Examples:

      lolcats import distill.pt finetune.pt --config model.yaml --config finetune.yaml -o out/
    """
    quiet_loading_bars()
    from lolcats.checkpoint import published

    published.import_published(weights, config, output, base=model)
    notes().print(f"written: {output}")
