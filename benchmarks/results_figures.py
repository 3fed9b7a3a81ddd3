"""The pictures of docs/results.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from results_data import Results

Picture = tuple[str, str | None, str]
"""Title, file (None: nothing measured), sentence."""
OURS, BASELINE = "LoLCATs-seed0", "Hedgehog-seed0"


def draw_figures(results: Results, folder: Path) -> list[Picture]:
    """Draw what there are numbers for into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for file, title, text, draw in (
        ("results_curves.png", "Perplexity during training", "Validation perplexity, main comparison.", curves),
        (
            "results_layers.png",
            "Error by layer",
            "Mean squared error of attention outputs against softmax attention.",
            layers,
        ),
        (
            "results_maps.png",
            "Attention weights",
            "Head 0 of five layers: softmax, swapped, trained; the last 32 queries and the first and last keys.",
            maps,
        ),
        (
            "results_esl.png",
            "Effective sequence length",
            "Distribution over 400 packed sequences of 1024 tokens, measured under the teacher.",
            lengths,
        ),
    ):
        figure = draw(results)
        if figure is not None:
            figure.savefig(folder / file, dpi=130)
        pictures.append((title, file if figure is not None else None, text))
    return pictures


def curves(results: Results) -> Figure | None:
    """The main comparison's seed 0: both stages, and stage 2 again where perplexities are near the teacher's."""
    drawn = [row for row in results.rows if row["sweep"] == "main" and row["seed"] == 0 and "stages" in row]
    drawn = [row for row in drawn if any(stage.get("curve") for stage in row["stages"].values())]
    if not drawn:
        return None
    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = (("transfer", "attention transfer"), ("adjust", "LoRA"), ("adjust", "LoRA, the lowest perplexities"))
    axes = figure.subplots(1, len(panels))
    for (stage, title), axis in zip(panels, axes, strict=True):
        for color, row in enumerate(drawn):
            curve = row["stages"].get(stage, {}).get("curve", [])
            axis.plot(*([*zip(*curve, strict=True)] or [[], []]), color=f"C{color}", marker=".", markersize=4)
        axis.set(title=title, xlabel="updates", ylabel="perplexity", yscale="log")
        axis.grid(alpha=0.3, which="both")
    teacher = results.metric("main", "teacher", "perplexity adjust")
    if teacher is not None:
        axes[-1].axhline(teacher[0], color="black", linewidth=1, linestyle="--")
        axes[-1].set(yscale="linear", ylim=(0.75 * teacher[0], 1.35 * teacher[0]))
    names = [", ".join(row["case"].values()) for row in drawn]
    lines = [Line2D([], [], color=f"C{color}", marker=".") for color in range(len(names))]
    figure.legend([*lines, Line2D([], [], color="black", linestyle="--")], [*names, "teacher"], loc="outside right")
    return figure


def layers(results: Results) -> Figure | None:
    """Errors by layer: from the analysis of both methods if there is one, else from the training report."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for run, style in ((OURS, "-"), (BASELINE, "--")):
        analysis = results.steps.get(f"analysis {run}", {}).get("result")
        if analysis is not None:
            for color, (stage, errors) in enumerate(analysis["mse"].items()):
                axis.plot(analysis["layers"], errors, style, color=f"C{color}", marker=".", label=f"{run}: {stage}")
    if not axis.lines:
        for row in results.runs("main", "LoLCATs"):
            stage = row["stages"].get("transfer", {})
            for name, label in (("layer_losses_before", "swapped"), ("layer_losses", "transfer")):
                if row["seed"] == 0 and name in stage:
                    points = sorted((int(layer), value / 1000) for layer, value in stage[name].items())
                    axis.plot(*zip(*points, strict=True), marker=".", label=f"{OURS}: {label}")
    if not axis.lines:
        return None
    axis.set(xlabel="layer", ylabel="mean squared error", yscale="log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def maps(results: Results) -> Figure | None:
    """Attention weights of head 0: a row a layer, a column a stage."""
    analysis = results.steps.get(f"analysis {OURS}", {}).get("result")
    if analysis is None:
        return None
    entries = [entry for entry in analysis["maps"]["maps"] if entry["head"] == 0]
    stages = ["softmax", *analysis["stages"]]
    figure = Figure(figsize=(3 * len(stages), 1.8 * len(entries)), layout="constrained")
    grid = figure.subplots(len(entries), len(stages), squeeze=False)
    for entry, row in zip(entries, grid, strict=True):
        for stage, axis in zip(stages, row, strict=True):
            axis.imshow(entry[stage], aspect="auto", cmap="magma", vmin=0.0, vmax=_high(entry["softmax"]))
            axis.set(xticks=[], yticks=[])
            axis.set_title(f"layer {entry['layer']}: {stage}", fontsize=8)
    return figure


def lengths(results: Results) -> Figure | None:
    """Histograms of the effective sequence length, one line a source."""
    found: dict[str, Any] = {
        name.removeprefix("esl "): step["result"]["models"][0]["esl"]
        for name, step in results.steps.items()
        if name.startswith("esl ")
    }
    if not found:
        return None
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axis = figure.subplots()
    for source, esl in found.items():
        histogram = esl["histogram"]
        shares = [count / esl["sequences"] for count in histogram["counts"]]
        axis.stairs(shares, histogram["edges"], label=f"{source} (mean {esl['mean']:,.0f})")
    axis.set(xlabel="effective sequence length (sum over queries, tokens)", ylabel="share of sequences")
    axis.legend(fontsize=8)
    return figure


def _high(rows: list[list[float]]) -> float:
    """A value that few weights exceed, so that one bright cell does not darken all others."""
    values = sorted(value for row in rows for value in row)
    return max(values[int(0.99 * (len(values) - 1))], 1e-6)
