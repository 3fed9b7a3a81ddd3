"""Validation perplexity during stage 2: lolcats-plus, the paper's recipe and softmax attention, on two models.

    python benchmarks/plot_plus.py benchmarks/results docs/images/plus.png

Lines are means over seeds, bands their range; where a band is missing there is one seed.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lolcats.sweep.results import read_rows

MAIN, OWN, MOVED, GEMMA = (
    "smollm2_h200_2026-11-21/rows.jsonl",
    "plus_default_smollm2_h200_2026-11-22.jsonl",
    "plus_positions_smollm2_h200_2026-11-22.jsonl",
    "plus_gemma_h200_2026-11-22.jsonl",
)
PANELS: dict[str, dict[str, tuple[str, str]]] = {  # model -> line -> file and label of its runs
    "SmolLM2 135M": {
        "paper's recipe": (MAIN, "LoLCATs"),
        "lolcats-plus": (MOVED, "1024 tokens, jump"),
        "lolcats-plus, own positions": (OWN, "lolcats-plus"),
        "softmax + the same LoRA": (MAIN, "softmax + LoRA"),
    },
    "Gemma 3 270M": {
        "paper's recipe": (GEMMA, "paper"),
        "lolcats-plus, own positions": (GEMMA, "plus, feature maps in stage 2"),
        "softmax + the same LoRA": (GEMMA, "softmax"),
    },
}
COLORS = {"paper's recipe": "C0", "lolcats-plus": "C1", "lolcats-plus, own positions": "C2"}


def curves(folder: Path, file: str, label: str) -> list[dict[int, float]]:
    """Update of stage 2 -> perplexity, for each seed."""
    rows: list[dict[str, Any]] = [
        row
        for row in read_rows(folder / file)
        if list(row["case"].values()) == [label] and row.get("sweep", "main") == "main"
    ]
    return [dict(row["stages"]["adjust"]["curve"]) for row in rows]


def draw(axis: Axes, folder: Path, lines: dict[str, tuple[str, str]]) -> None:
    for name, (file, label) in lines.items():
        color = COLORS.get(name, "C3")
        seeds = curves(folder, file, label)
        steps = [step for step in seeds[0] if step >= 100]
        values = [[seed[step] for seed in seeds] for step in steps]
        title = f"{name} ({len(seeds)} seed{'s' * (len(seeds) > 1)})"
        axis.plot(steps, [statistics.fmean(each) for each in values], color=color, marker=".", label=title)
        axis.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.25)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="benchmarks/results")
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    figure = Figure(figsize=(10, 4), layout="constrained")
    for (model, lines), axis in zip(PANELS.items(), figure.subplots(1, len(PANELS)), strict=True):
        draw(axis, arguments.results, lines)
        axis.set(title=model, xlabel="updates of stage 2", ylabel="validation perplexity")
    figure.savefig(arguments.picture, dpi=130)


if __name__ == "__main__":
    main()
