"""Passkeys found by depth and length of the text, as heat maps.

    python benchmarks/plot_passkeys.py benchmarks/results docs/images/passkeys.png

Cells are means over seeds.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lolcats.sweep.results import read_rows

LONG, MOVED = "plus_long_smollm2_h200_2026-11-22.jsonl", "plus_positions_smollm2_h200_2026-11-22.jsonl"
PANELS = {  # title -> file and label of its runs
    "paper's recipe\n1024 tokens": (LONG, "paper, 1024 tokens"),
    "paper's recipe\n8192 tokens": (LONG, "paper, 8192 tokens"),
    "lolcats-plus, 8192 tokens\nown positions": (LONG, "plus, 8192 tokens and feature maps"),
    "lolcats-plus\nmoved, no jump": (MOVED, "1024 tokens, moved"),
    "lolcats-plus\nas it is": (MOVED, "1024 tokens, jump"),
    "lolcats-plus\n4096 tokens": (MOVED, "4096 tokens, jump"),
}


def depths(rows: list[dict[str, Any]]) -> dict[int, list[float]]:
    """Length -> share found in each tenth of depth, in percent."""
    runs = [{entry["length"]: entry["deciles"] for entry in row["evaluation"]["passkey"]} for row in rows]
    return {
        length: [100 * statistics.fmean(tenth) for tenth in zip(*(run[length] for run in runs), strict=True)]
        for length in sorted(runs[0])
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="benchmarks/results")
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, len(PANELS), sharey=True)
    for (title, (file, label)), axis in zip(PANELS.items(), axes, strict=True):
        rows = [row for row in read_rows(arguments.results / file) if label in row["case"].values()]
        found = depths(rows)
        image = axis.imshow(list(zip(*found.values(), strict=True)), cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
        axis.set_title(f"{title}\n({len(rows)} seed{'s' * (len(rows) > 1)})", fontsize=8)
        axis.set_xticks(range(len(found)), [f"{length:,}" for length in found], fontsize=8)
        axis.set_yticks(range(10), [f"{10 * tenth}-{10 * tenth + 10} %" for tenth in range(10)], fontsize=8)
        axis.set_xlabel("tokens", fontsize=8)
    axes[0].set_ylabel("depth of the key")
    figure.colorbar(image, ax=axes, label="passkeys found, %")
    figure.savefig(arguments.picture, dpi=130)


if __name__ == "__main__":
    main()
