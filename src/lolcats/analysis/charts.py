"""The charts of the report page, drawn by matplotlib as SVG texts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from lolcats.analysis.diagnostics import bin_names, mean_over_layers

STAGES = {
    "swapped": "swapped, untrained",
    "transfer": "after attention transfer",
    "adjust": "after adjusting",
    "trained": "trained model",
}
SOFTMAX = "softmax (original)"
COLORS = {"swapped": "tab:gray", "transfer": "tab:blue", "adjust": "tab:orange", "trained": "tab:blue"}

Series = dict[str, list[Any]]
"""Label of a line -> its values."""


@dataclass(frozen=True)
class Chart:
    """`svg` is a whole SVG document."""

    title: str
    note: str
    svg: str


def training_charts(report: dict[str, Any]) -> list[Chart]:
    """Validation perplexity and losses over the updates of each stage."""
    charts = []
    for name, stage in report.get("stages", {}).items():
        curve = stage.get("curve", [])
        label = {"transfer": "Attention transfer", "adjust": "Low-rank adjusting"}.get(name, name)
        best = f"Best at update {stage['best_step']:,}." if "best_step" in stage else ""
        unit = "In nats per token." if name == "adjust" else "In mse_factor * MSE + xent_factor * cross-entropy."
        training = [(entry["step"], entry["train"]["loss"]) for entry in curve if entry.get("train", {}).get("loss")]
        for title, note, lines in (
            ("validation perplexity", best, {"validation perplexity": _points(curve, "perplexity")}),
            ("loss", unit, {"training": training, "validation": _points(curve, "loss")}),
        ):
            lines = {line: points for line, points in lines.items() if points}
            if lines:
                charts.append(_chart(f"{label}: {title}", note, _curves(lines, "update", title.split()[-1])))
    return charts


def layer_charts(report: dict[str, Any], analysis: dict[str, Any] | None) -> list[Chart]:
    """Errors, shares and updates by layer; without an analysis the layers' losses, which every run reports."""
    if analysis is None:
        stage = report.get("stages", {}).get("transfer", {})
        before, after = stage.get("layer_losses_before"), stage.get("layer_losses")
        if not (before and after):
            return []
        layers = sorted(before, key=int)
        losses = {STAGES["swapped"]: [before[x] for x in layers], STAGES["transfer"]: [after[x] for x in layers]}
        note = "Validation loss of attention transfer, before and after."
        return [_chart("Loss by layer", note, _bars(layers, losses, "layer", "loss", log=True))]
    layers = [str(layer) for layer in analysis["layers"]]
    note = "Mean squared error of each layer's output against its own softmax attention, on the same hidden states."
    charts = [_chart("Output error", note, _bars(layers, _by_stage(analysis["mse"]), "layer", "MSE", log=True))]
    if (original := analysis["mse_original"].get("adjust")) and "transfer" in analysis["mse"]:
        series = {
            STAGES["transfer"]: analysis["mse"]["transfer"],
            "adjusted, against its own softmax": analysis["mse"]["adjust"],
            "adjusted, against the original's": original,
        }
        note = "Adjusting trains for the next token, so a layer may leave the attention that it replaced."
        charts.append(_chart("Error after adjusting", note, _bars(layers, series, "layer", "MSE", log=True)))
    share = analysis["linear_share"]
    note = "Part of the attention weights' sum that comes from beyond the window, mean over heads and queries."
    charts.append(_chart("Share of the linear part", note, _bars(layers, _by_stage(share["share"]), "layer", "share")))
    found = analysis["error_by_position"]
    means = {stage: mean_over_layers(rows) for stage, rows in found["relative"].items()}
    note = "Mean squared error over the mean square of the softmax outputs, by position of the token; mean over layers."
    bars = _bars(bin_names(found["positions"]), _by_stage(means), "position", "relative error")
    charts.append(_chart("Relative error by position", note, bars))
    last = analysis["stages"][-1]
    means = {SOFTMAX: mean_over_layers(share["softmax_by_distance"])}
    means |= _by_stage({stage: mean_over_layers(share["by_distance"][stage]) for stage in analysis["stages"]})
    means["its linear part"] = mean_over_layers(share["linear_by_distance"][last])
    note = "Attention weight by distance between query and key, mean over layers, heads and queries."
    charts.append(_chart("Weight by distance", note, _bars(bin_names(share["distances"]), means, "distance", "weight")))
    return charts


def map_chart(analysis: dict[str, Any]) -> Chart | None:
    """Attention weights of some layers and heads: a row each, a column for softmax and each stage."""
    maps = analysis.get("maps") or {}
    entries = maps.get("maps")
    if not entries:
        return None
    stages = [SOFTMAX, *analysis["stages"]]

    def draw(figure: Figure) -> None:
        figure.set_layout_engine("none")  # slow for so many axes
        space = {
            "left": 0.01,
            "right": 0.99,
            "bottom": 0.01,
            "top": 1 - 0.2 / len(entries),
            "wspace": 0.05,
            "hspace": 0.3,
        }
        grid = figure.subplots(len(entries), len(stages), squeeze=False, gridspec_kw=space)
        for entry, axes in zip(entries, grid, strict=True):
            values = sorted(value for row in entry["softmax"] for value in row)
            high = max(values[int(0.99 * (len(values) - 1))], 1e-6)  # one bright cell does not darken all others
            for stage, axis in zip(stages, axes, strict=True):
                weights = entry["softmax" if stage == SOFTMAX else stage]
                axis.imshow(weights, aspect="auto", cmap="magma", vmin=0.0, vmax=high)
                axis.set(xticks=[], yticks=[])
                axis.set_title(f"{entry['layer']}/{entry['head']} {STAGES.get(stage, stage)}", fontsize=7)

    note = f"Layer/head: the last {maps['span']} queries (rows) with the first and last keys of a held-out sequence."
    return _chart("Attention weights", note, draw, (2.6 * len(stages), 1.2 * len(entries)))


def length_chart(evaluation: dict[str, Any]) -> Chart | None:
    """Distribution of the effective sequence length in the text of `lolcats eval --tasks esl`; a line a model."""
    lines = {}
    for row in evaluation["models"]:
        if found := row.get("esl"):
            middles = [(low + high) / 2 for low, high in itertools.pairwise(found["histogram"]["edges"])]
            shares = [count / found["sequences"] for count in found["histogram"]["counts"]]
            lines[Path(row["model"]).name] = list(zip(middles, shares, strict=True))
    if not lines:
        return None
    note = "How far each sequence's queries look back, summed over its queries."
    return _chart("Effective sequence length", note, _curves(lines, "tokens", "share of sequences"))


def _by_stage(values: dict[str, list[Any]]) -> Series:
    return {STAGES.get(stage, stage): row for stage, row in values.items()}


def _points(curve: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    found = ((entry["step"], entry.get(key)) for entry in curve)
    return [(step, value) for step, value in found if isinstance(value, int | float) and math.isfinite(value)]


def _curves(lines: Series, x: str, y: str) -> Callable[[Figure], None]:
    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        for label, points in lines.items():
            axis.plot(*zip(*points, strict=True), marker=".", label=label)
        _finish(axis, x, y)

    return draw


def _bars(names: list[str], series: Series, x: str, y: str, *, log: bool = False) -> Callable[[Figure], None]:
    """Bars side by side; values that are None are left out."""
    others = itertools.cycle(("tab:green", "tab:red", "tab:purple", "tab:brown"))
    colors = {SOFTMAX: "black"} | {STAGES[stage]: color for stage, color in COLORS.items()}
    colors = {label: colors.get(label) or next(others) for label in series}

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        width = 0.8 / len(series)
        for place, (label, values) in enumerate(series.items()):
            where = [number - 0.4 + width * (place + 0.5) for number in range(len(names))]
            heights = [math.nan if value is None else value for value in values]
            axis.bar(where, heights, width, label=label, color=colors[label])
        step = math.ceil(len(names) / 16)
        axis.set_xticks(range(0, len(names), step), names[::step], fontsize=7)
        _finish(axis, x, y, log=log)

    return draw


def _finish(axis: Any, x: str, y: str, *, log: bool = False) -> None:
    axis.set(xlabel=x, ylabel=y)
    if log:
        axis.set_yscale("log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _chart(
    title: str, note: str, draw: Callable[[Figure], None], size_inches: tuple[float, float] = (6.0, 3.4)
) -> Chart:
    figure, written = Figure(figsize=size_inches, layout="constrained"), StringIO()
    draw(figure)
    # Text stays text, and the same numbers give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lolcats"}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    return Chart(title, note, written.getvalue())
