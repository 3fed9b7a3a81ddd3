"""`lolcats select-layers`: choose the layers that keep softmax attention."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lolcats.cli.console import notes, quiet_loading_bars
from lolcats.cli.options import BeginToken, Device, Dtype, HeldOut, LossOn, SequenceLength, data_section
from lolcats.errors import UserError

SELECTION_FILE = "selection.json"


def select_layers(
    folder: Annotated[Path, typer.Argument(help="A linearized model: output folder of `lolcats linearize`.")],
    data: HeldOut,
    budget: Annotated[
        int | None, typer.Option(min=1, help="So many layers may keep softmax attention.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the model with these layers restored here.", show_default=False),
    ] = None,
    way: Annotated[
        str, typer.Option(help="restored: one softmax layer among linear ones; linearized: the other way round.")
    ] = "restored",
    step: Annotated[int, typer.Option(min=1, help="Layers from one point of the curve to the next.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence, for its memory.")] = 8192,
    sequence_length: SequenceLength = 1024,
    max_sequences: Annotated[int, typer.Option(min=1, help="Use this many sequences.")] = 32,
    loss_on: LossOn = "answer",
    begin_token: BeginToken = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per forward pass.")] = 4,
    plot: Annotated[Path | None, typer.Option(help="Also draw a .png.", show_default=False)] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Rank layers by what their softmax attention is worth; show quality against memory; restore the best.

    Nothing is trained. What was measured is kept in FOLDER/selection.json: a call that was stopped goes on.

    Examples:

      lolcats select-layers out/ --data held_out.jsonl

      lolcats select-layers out/ --data held_out.jsonl --budget 4 -o hybrid/
    """
    if output is not None and budget is None:
        raise UserError("--output writes the model with --budget layers restored; give --budget too")
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is not an empty folder; choose another --output")
    section = data_section(
        data,
        sequence_length=sequence_length,
        loss_on=loss_on,
        validation_sequences=max_sequences,
        begin_token=begin_token,
    )
    quiet_loading_bars()
    from lolcats.analysis import selection
    from lolcats.analysis.files import write_json
    from lolcats.data import build_evaluation_dataset
    from lolcats.evaluation.load import load_model
    from lolcats.evaluation.trained import with_begin_token
    from lolcats.modeling.model import LolcatsForCausalLM
    from lolcats.provenance import provenance
    from lolcats.report import read_optional

    if plot is not None:
        from lolcats.bench.decode_plot import require_matplotlib

        require_matplotlib()
    if way not in selection.WAYS:
        raise UserError(f"--way {way}: expected one of {', '.join(selection.WAYS)}")
    model, tokenizer = load_model(folder, dtype=dtype, device=device)
    if not isinstance(model, LolcatsForCausalLM):
        raise UserError(f"{folder} is not a linearized model; make one with `lolcats linearize`")
    section = with_begin_token(section, folder, tokenizer)
    dataset = build_evaluation_dataset(section, tokenizer)
    settings = {
        "data": section.model_dump(mode="json"),
        "fingerprint": dataset.info.get("fingerprint"),
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    before = read_optional(folder / SELECTION_FILE) or {}
    result: dict[str, Any] = {"way": way, "context": context, "settings": settings}
    result["losses"] = before["losses"] if before.get("settings") == settings else {}
    result["provenance"] = provenance()

    layers = model.linear_layers()
    total = len(list(layers))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes(), transient=True) as bar:
        counts = sorted({*range(0, total, step), total, *([budget] if budget else [])})
        task = bar.add_task("choices measured", total=total + len(counts))

        def measured() -> None:
            write_json(folder / SELECTION_FILE, result)
            bar.advance(task)

        losses = selection.Losses(model, dataset, batch_size=batch_size, known=result["losses"], on_measure=measured)
        selection.check_budget(losses, budget)
        result["ranking"] = selection.rank_layers(losses, way)
        order = [row["layer"] for row in result["ranking"]]
        result["curve"] = selection.curve(losses, order, counts, context)
    write_json(folder / SELECTION_FILE, result)
    Console().print(_ranking_table(result))
    Console().print(_curve_table(result))
    if plot is not None:
        from lolcats.analysis.selection_plot import plot as draw

        draw(result, plot)
    if budget is not None:
        chosen = sorted(order[:budget])
        Console().print(f"to linearize anew with these: --keep-softmax {','.join(map(str, chosen))}", highlight=False)
        if output is not None:
            model.restore_softmax(chosen)
            model.save_pretrained(output)
            tokenizer.save_pretrained(output)
            notes().print(f"written: {output}")


def _ranking_table(result: dict[str, Any]) -> Table:
    table = Table(title=f"what softmax attention is worth, by layer ({result['way']})", title_justify="left")
    for column in ("layer", "nats/token", "perplexity"):
        table.add_column(column, justify="right")
    for row in result["ranking"]:
        table.add_row(str(row["layer"]), f"{row['worth']:+.4f}", f"{math.exp(row['loss']):.3f}")
    return table


def _curve_table(result: dict[str, Any]) -> Table:
    table = Table(title="softmax layers, the best ones first", title_justify="left")
    for column in ("layers", "perplexity", f"MiB at {result['context']:,} tokens"):
        table.add_column(column, justify="right")
    for row in result["curve"]:
        table.add_row(str(row["layers"]), f"{math.exp(row['loss']):.3f}", f"{row['bytes'] / 2**20:.2f}")
    return table
