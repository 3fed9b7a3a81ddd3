"""`lolcats report`: what a finished run's files tell, in its model card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lolcats.cli.console import notes


def report(folder: Annotated[Path, typer.Argument(help="Output folder of `lolcats linearize`.")]) -> None:
    """Write training curves and, where there are some, evaluations (eval.json) into FOLDER's model card.

    Charts are pictures in FOLDER/charts.

    Examples:

      lolcats report out/
    """
    from lolcats.analysis.card import write_card

    notes().print(f"written: {write_card(folder)}")
