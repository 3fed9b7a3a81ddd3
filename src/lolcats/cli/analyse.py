"""`lolcats analyse` and `lolcats report`: look into a linearized model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lolcats.cli.console import notes, quiet_loading_bars
from lolcats.cli.options import BeginToken, LossOn, SequenceLength, Sources, config_options, data_section


@config_options("device", "dtype")
def analyse(
    folder: Annotated[Path, typer.Argument(help="Output folder of `lolcats linearize`.")],
    data: Sources = None,
    sequence_length: SequenceLength = 1024,
    max_sequences: Annotated[int, typer.Option(min=1, help="Use this many sequences.")] = 16,
    loss_on: LossOn = "answer",
    begin_token: BeginToken = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per forward pass; memory is quadratic.")] = 1,
    *,
    given: dict[str, Any],
) -> None:
    """Measure errors, attention by distance, attention maps and ablations, and write FOLDER/analysis.json.

    `lolcats report` shows them. docs/analysis.md says what each number is.

    Examples:

      lolcats analyse out/ --data held_out.jsonl
    """
    section = data_section(
        data or [],
        sequence_length=sequence_length,
        loss_on=loss_on,
        validation_sequences=max_sequences,
        begin_token=begin_token,
    )
    quiet_loading_bars()
    from lolcats.analysis.analyse import analyse as run
    from lolcats.analysis.diagnostics import worst_rows

    console = notes()
    values = run(
        folder,
        section,
        **given,
        batch_size=batch_size,
        report=console.print,
    )
    for note in values["notes"]:
        console.print(note, markup=False)
    table = Table(title="mean squared error against softmax attention, by layer", title_justify="left")
    table.add_column("layer", justify="right")
    for stage in values["stages"]:
        table.add_column(stage, justify="right")
    table.add_column("linear share", justify="right")
    share = values["linear_share"]["share"][values["stages"][-1]]
    for place, layer in enumerate(values["layers"]):
        errors = [f"{values['mse'][stage][place]:.3g}" for stage in values["stages"]]
        table.add_row(str(layer), *errors, f"{share[place]:.1%}")
    Console().print(table)
    Console().print(_by_position(values["error_by_position"], values["stages"]))
    table = Table(title=f"largest relative errors, {values['worst']['stage']}", title_justify="left")
    for name in ("rank", "layer", "error", "layer/head", "error"):
        table.add_column(name, justify="right")
    for row in worst_rows(values["worst"]):
        table.add_row(*row)
    Console().print(table)
    ablations = ", ".join(f"{name} {value:.3f}" for name, value in values["ablations"].items() if value is not None)
    Console().print(f"perplexity: {ablations}", highlight=False)
    console.print(f"written: {folder / 'analysis.json'}")


def _by_position(found: dict[str, Any], stages: list[str]) -> Table:
    from lolcats.analysis.diagnostics import bin_names, mean_over_layers

    table = Table(title="relative error by token position, mean over layers", title_justify="left")
    for name in ("position", *stages):
        table.add_column(name, justify="right")
    means = [mean_over_layers(found["relative"][stage]) for stage in stages]
    for name, *row in zip(bin_names(found["positions"]), *means, strict=True):
        table.add_row(name, *("-" if mean is None else f"{mean:.1%}" for mean in row))
    return table


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
