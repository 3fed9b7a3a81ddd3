"""`lolcats push`: a written folder on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lolcats.cli.console import notes


def push(
    folder: Annotated[Path, typer.Argument(help="Output folder of `lolcats linearize`.")],
    repository: Annotated[str, typer.Argument(help="OWNER/NAME on the hub; made if it is not there.")],
    private: Annotated[bool, typer.Option("--private", help="A new repository is seen by its owner alone.")] = False,
    base: Annotated[str | None, typer.Option(help="Hub id of the base model, if it was a local folder.")] = None,
    licence: Annotated[str | None, typer.Option("--license", help="For a base model whose card names none.")] = None,
) -> None:
    """Publish a linearized model: weights, code and card, without the run's checkpoints.

    The card gets the base model and its licence: read whether it lets you publish a changed model. `lolcats report`
    before it writes curves and evaluations into the card.

    Examples:

      lolcats push out/ me/SmolLM2-135M-lolcats
    """
    from lolcats.checkpoint.push import push as send

    licence, address = send(folder, repository, base=base, licence=licence, private=private)
    notes().print(f"licence {licence}: {address}", highlight=False)
