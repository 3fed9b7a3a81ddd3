"""The decoding benchmark as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from lolcats.errors import UserError

STYLE = {"lolcats": {"color": "tab:blue", "marker": "o"}, "softmax": {"color": "tab:orange", "marker": "s"}}
NAMES = {"lolcats": "linearized (lolcats)", "softmax": "softmax (transformers)"}


def plot(report: dict[str, Any], path: Path) -> None:
    """Write a PNG: throughput and memory over batch sizes, latency over positions, prefill over lengths.

    Raises:
        UserError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    settings = report["settings"]
    sections = {name: section["rows"] for name, section in report["sections"].items()}
    batches = sections.get("throughput", []) + sections.get("softmax", [])
    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(f"{settings['model']} shape, {settings['dtype']}, {report['provenance']['device']}")
    axes = figure.subplots(2, 2)

    run_of = f"{settings['prompt_tokens']}-token prompts, {settings['new_tokens']} new tokens"
    _curves(axes[0, 0], batches, "batch", "tokens_per_s")
    for system, style in STYLE.items():
        floor = sorted((row["batch"], row["floor_tokens_per_s"]) for row in _of(batches, "floor_ms", system))
        if floor:
            label = f"{NAMES[system]}: what bandwidth and matmuls allow"
            axes[0, 0].plot(*zip(*floor, strict=True), color=style["color"], linestyle=":", label=label)
    _finish(axes[0, 0], f"Throughput: {run_of}", "sequences (batch size)", "new tokens/s")

    _curves(axes[0, 1], batches, "batch", "peak_gib")
    _finish(axes[0, 1], f"Peak memory: {run_of}", "sequences (batch size)", "GiB")

    _curves(axes[1, 0], sections.get("latency", []), "position", "step_ms")
    _finish(axes[1, 0], "Latency of a token, one sequence", "position in the sequence", "ms")

    _curves(axes[1, 1], sections.get("prefill", []), "tokens", "seconds")
    _finish(axes[1, 1], "Prefill of one prompt", "prompt tokens", "s")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format="png")


def require_matplotlib() -> None:
    """Ask before measuring, not after.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("pictures need matplotlib; install it with: pip install 'lolcats[bench]'")


def _of(rows: list[dict[str, Any]], name: str, system: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["system"] == system and row.get(name) is not None]


def _curves(axes: Any, rows: list[dict[str, Any]], x: str, y: str) -> None:
    """A line for each system; a cross at the top where it ran out of memory."""
    for system, style in STYLE.items():
        own = [row for row in rows if row["system"] == system]
        points = sorted((row[x], row[y]) for row in _of(own, y, system))
        if points:
            axes.plot(*zip(*points, strict=True), label=NAMES[system], **style)
        for index, row in enumerate(row for row in own if row.get("error") == "out of memory"):
            label = f"{NAMES[system]}: out of memory" if index == 0 else None
            place = {"transform": axes.get_xaxis_transform(), "clip_on": False, "linestyle": "none"}
            axes.plot([row[x]], [0.97], marker="x", markersize=10, color=style["color"], label=label, **place)


def _finish(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if not axes.lines:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
        return
    axes.set_xscale("log")
    ticks = sorted({x for line in axes.lines for x in line.get_xdata()})
    axes.set_xticks(ticks, [f"{x:,}" for x in ticks], fontsize=8)
    axes.minorticks_off()
    if any(len(line.get_xdata()) > 1 for line in axes.lines):
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
