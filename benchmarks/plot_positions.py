"""Perplexity of long texts by position, of models trained on short and long sequences, moved and not.

    python benchmarks/plot_positions.py benchmarks/results docs/images/positions.png

One seed a line, logarithmic axes, windows of 65536 tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

BEFORE, AFTER = "long_text_smollm2_h200_2026-11-22.json", "long_text_positions_smollm2_h200_2026-11-22.json"
LINES = {  # label -> file and part of the model's folder
    "softmax teacher": (BEFORE, "teacher"),
    "paper's recipe, 1024 tokens": (BEFORE, "paper_1024"),
    "lolcats-plus, 1024, own positions": (BEFORE, "lolcats_plus"),
    "lolcats-plus, 8192, own positions": (BEFORE, "plus_8192"),
    "lolcats-plus (1024, jump)": (AFTER, "1024_tokens_jump"),
    "lolcats-plus, 4096, jump": (AFTER, "4096_tokens_jump"),
}


def models(report: Any) -> list[dict[str, Any]]:
    """Every entry with a model's positions, however deep in the report."""
    if isinstance(report, dict):
        return [report] if "positions" in report else [each for part in report.values() for each in models(part)]
    return [each for part in report for each in models(part)] if isinstance(report, list) else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="benchmarks/results")
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    found = {file: models(json.loads((arguments.results / file).read_text())) for file in (BEFORE, AFTER)}
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for label, (file, name) in LINES.items():
        model = next(each for each in found[file] if name in each["model"])
        shown = [entry for entry in model["positions"] if entry["start"] >= 64]
        edges = [shown[0]["start"], *(entry["end"] for entry in shown)]
        style = {"color": "black", "linestyle": "--"} if name == "teacher" else {}
        axis.stairs([entry["perplexity"] for entry in shown], edges, baseline=None, label=label, linewidth=2, **style)
    axis.set(xscale="log", yscale="log", xlabel="tokens before", ylabel="perplexity", title="books, SmolLM2 135M")
    axis.set_xticks([2**n for n in range(6, 17)], [f"{2**n:,}" for n in range(6, 17)], rotation=30)
    axis.minorticks_off()
    axis.set_yticks([30, 50, 100, 300, 1000, 3000], ["30", "50", "100", "300", "1000", "3000"])
    axis.axvline(8192, color="gray", linewidth=1, linestyle=":")
    note = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 8, "color": "gray"}
    axis.annotate("the teacher's positions end", (8192, 30), **note)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(arguments.picture, dpi=130)


if __name__ == "__main__":
    main()
