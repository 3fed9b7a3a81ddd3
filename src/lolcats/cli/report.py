"""`lolcats report`: a page about a linearized model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lolcats.cli.console import notes


def report(
    folder: Annotated[Path, typer.Argument(help="Output folder of `lolcats linearize`.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="HTML file; default FOLDER/report.html.", show_default=False)
    ] = None,
) -> None:
    """Write one HTML page with everything that FOLDER's files tell; it needs no network.

    It shows the run's own report and, where they are, analysis.json (`lolcats analyse`), eval.json and
    generation.json (`lolcats eval`).

    Examples:

      lolcats report out/
    """
    from lolcats.analysis.page import write_page

    written = write_page(folder, output)
    notes().print(f"written: {written}")
