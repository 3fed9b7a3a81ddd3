"""What an output folder's files tell, as tables and charts at the end of its model card, which the hub shows."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lolcats.errors import UserError
from lolcats.evaluation.tables import tables
from lolcats.report import EVALUATION_FILE, REPORT_FILE, markdown_table, public_name, read_optional, write_text

CARD_FILE, CHARTS = "README.md", "charts"
MARK = "<!-- lolcats report -->"
"""In the card, before what `lolcats report` writes."""

Chart = tuple[str, str, Figure]
"""Title, note, picture."""


def write_card(folder: str | Path) -> Path:
    """Write evaluations (eval.json), training curves and layers' losses into the card; returns its path.

    Charts are pictures in `charts/`. What an earlier call wrote is replaced.
    """
    folder = Path(folder).expanduser()
    report, card = read_optional(folder / REPORT_FILE), folder / CARD_FILE
    if report is None or not card.is_file():
        raise UserError(f"{folder} has no {REPORT_FILE} and {CARD_FILE}; give the output folder of `lolcats linearize`")
    lines = [card.read_text(encoding="utf-8").partition(MARK)[0].rstrip("\n"), "", MARK, ""]
    evaluation = read_optional(folder / EVALUATION_FILE) or {}
    if models := evaluation.get("models"):
        named = [row | {"model": public_name(row["model"])} for row in models]
        for title, columns, rows in tables(evaluation | {"models": named}):
            lines += [f"## {title}", "", *markdown_table(columns, rows), ""]
    (folder / CHARTS).mkdir(exist_ok=True)
    for title, note, figure in [*training_charts(report), *layer_charts(report)]:
        picture = f"{CHARTS}/{re.sub('[^a-z]+', '_', title.lower())}.png"
        figure.savefig(folder / picture, dpi=120)
        lines += [f"## {title}", "", note, "", f"![{title}]({picture})", ""]
    write_text(card, "\n".join(lines))
    return card


def training_charts(report: dict[str, Any]) -> list[Chart]:
    """Validation perplexity and losses over the updates of each stage."""
    charts = []
    for name, stage in report.get("stages", {}).items():
        curve = stage.get("curve", [])
        label = {"transfer": "Attention transfer", "gates": "Head gates"}.get(name, "Low-rank adjusting")
        best = f"Best at update {stage['best_step']:,}." if "best_step" in stage else ""
        units = {"transfer": "mse_factor * MSE + xent_factor * cross-entropy", "gates": "nats + penalty * mean gate"}
        unit = f"In {units.get(name, 'nats per token')}."
        training = [(entry["step"], entry["train"]["loss"]) for entry in curve if entry.get("train", {}).get("loss")]
        for title, note, lines in (
            ("validation perplexity", best, {"validation perplexity": _points(curve, "perplexity")}),
            ("loss", unit, {"training": training, "validation": _points(curve, "loss")}),
        ):
            lines = {line: points for line, points in lines.items() if points}
            if lines:
                chart, axis = _chart(f"{label}: {title}", note, "update", title.split()[-1])
                for line, points in lines.items():
                    axis.plot(*zip(*points, strict=True), marker=".", label=line)
                axis.legend(fontsize=8)
                charts.append(chart)
    return charts


def layer_charts(report: dict[str, Any]) -> list[Chart]:
    """The layers' losses of attention transfer."""
    stage = report.get("stages", {}).get("transfer", {})
    before, after = stage.get("layer_losses_before"), stage.get("layer_losses")
    if not before or not after:
        return []
    names = sorted(before, key=int)
    chart, axis = _chart("Loss by layer", "Validation loss of attention transfer, before and after.", "layer", "loss")
    for label, losses, shift, colour in (("before", before, -0.2, "tab:gray"), ("after", after, 0.2, "tab:blue")):
        places = [place + shift for place in range(len(names))]
        axis.bar(places, [losses[name] for name in names], 0.4, label=label, color=colour)
    step = math.ceil(len(names) / 16)
    axis.set_xticks(range(0, len(names), step), names[::step], fontsize=7)
    axis.set_yscale("log")
    axis.legend(fontsize=8)
    return [chart]


def _points(curve: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    found = ((entry["step"], entry.get(key)) for entry in curve)
    return [(step, value) for step, value in found if isinstance(value, int | float) and math.isfinite(value)]


def _chart(title: str, note: str, x: str, y: str) -> tuple[Chart, Any]:
    figure = Figure(figsize=(6.0, 3.4), layout="constrained")
    axis = figure.subplots()
    axis.set(xlabel=x, ylabel=y)
    axis.grid(alpha=0.3)
    return (title, note, figure), axis
