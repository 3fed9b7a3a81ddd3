"""Layer selection as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any


def plot(result: dict[str, Any], path: Path) -> None:
    """Write a PNG: what each layer is worth, and perplexity against memory. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = sorted(result["ranking"], key=lambda row: row["layer"])
    left.bar([row["layer"] for row in rows], [row["worth"] for row in rows], color="tab:blue")
    left.axhline(0.0, color="black", linewidth=0.8)
    left.set_title(f"What softmax attention in one layer is worth ({result['way']})", fontsize=10)
    left.set_xlabel("layer")
    left.set_ylabel("nats per token")

    points = sorted(result["curve"], key=lambda row: row["bytes"])
    memory = [row["bytes"] / 2**20 for row in points]
    right.plot(memory, [math.exp(row["loss"]) for row in points], marker="o", color="tab:blue")
    for x, row in zip(memory, points, strict=True):
        right.annotate(str(row["layers"]), (x, math.exp(row["loss"])), textcoords="offset points", xytext=(4, 4))
    right.set_title("Perplexity by number of softmax layers", fontsize=10)
    right.set_xlabel(f"MiB per sequence of {result['context']:,} tokens")
    right.set_ylabel("perplexity")
    right.grid(alpha=0.3)
    figure.savefig(path, dpi=150, format="png")
