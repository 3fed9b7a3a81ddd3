"""`lolcats analyse` and `lolcats report`: look into a linearized model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lolcats.cli.console import notes, quiet_loading_bars
from lolcats.cli.options import DATA_OPTIONS, Sources, config_options, data_section
from lolcats.report import table


@config_options("device", "dtype", *DATA_OPTIONS)
def analyse(
    folder: Annotated[Path, typer.Argument(help="Output folder of `lolcats linearize`.")],
    data: Sources = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="Use this many sequences.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per forward pass; memory is quadratic.")] = 1,
    *,
    given: dict[str, Any],
) -> None:
    """Measure errors and the linear part's share, and write FOLDER/analysis.json.

    `lolcats report` shows them. docs/evaluation.md says what each number is.

    Examples:

      lolcats analyse out/ --data held_out.jsonl
    """
    section = data_section(data, given, validation_sequences=max_sequences)
    where = {name: given[name] for name in ("device", "dtype") if name in given}
    quiet_loading_bars()
    from lolcats.analysis.analyse import analyse as run

    console = notes()
    values = run(folder, section, **where, batch_size=batch_size, report=console.print)
    columns = zip(values["layers"], values["mse"], values["linear_share"]["share"], strict=True)
    rows = [[layer, f"{mse:.3g}", f"{share:.1%}"] for layer, mse, share in columns]
    Console().print(table("against softmax attention, by layer", ["layer", "mean squared error", "linear share"], rows))
    console.print(f"written: {folder / 'analysis.json'}")


def report(folder: Annotated[Path, typer.Argument(help="Output folder of `lolcats linearize`.")]) -> None:
    """Write training curves and, where they are, analysis and evaluations into FOLDER's model card.

    They are in analysis.json (`lolcats analyse`) and eval.json (`lolcats eval`). Charts are pictures in FOLDER/charts.

    Examples:

      lolcats report out/
    """
    from lolcats.analysis.card import write_card

    notes().print(f"written: {write_card(folder)}")
