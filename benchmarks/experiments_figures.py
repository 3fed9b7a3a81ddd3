"""The pictures of docs/experiments.md and README.md that compare lolcats-plus with what it came from.

    python benchmarks/experiments_figures.py benchmarks/results docs/images

plus.png: validation perplexity during stage 2 on two models; lines are means over seeds, bands their range.
positions.png: perplexity of long texts by position, windows of 65536 tokens, one seed.
passkeys.png: passkeys found by depth and length of the text, means over seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lolcats.sweep.results import read_rows

MAIN, DEFAULT, POSITIONS, HORIZON, LONG, GEMMA = (
    "smollm2_h200_2026-11-21/rows.jsonl",
    "plus_default_smollm2_h200_2026-11-22.jsonl",
    "plus_positions_smollm2_h200_2026-11-22.jsonl",
    "plus_horizon_smollm2_h200_2026-11-23.jsonl",
    "plus_long_smollm2_h200_2026-11-22.jsonl",
    "plus_gemma_h200_2026-11-22.jsonl",
)
TEXTS, TEXTS_HORIZON, KEYS_HORIZON = (
    "long_text_smollm2_h200_2026-11-22.json",
    "long_text_horizon_h200_2026-11-23.json",
    "passkey_horizon_h200_2026-11-23.json",
)

CURVES = {  # model -> line -> file and label of its runs, and color
    "SmolLM2 135M": {
        "paper's recipe": (MAIN, "LoLCATs", "C0"),
        "lolcats-plus": (HORIZON, "1024 tokens, jump, quarter", "C1"),
        "lolcats-plus, own positions": (DEFAULT, "lolcats-plus", "C2"),
        "softmax + the same LoRA": (MAIN, "softmax + LoRA", "C3"),
    },
    "Gemma 3 270M": {
        "paper's recipe": (GEMMA, "paper", "C0"),
        "lolcats-plus": (GEMMA, "plus, moved", "C1"),
        "lolcats-plus, own positions": (GEMMA, "plus, feature maps in stage 2", "C2"),
        "softmax + the same LoRA": (GEMMA, "softmax", "C3"),
    },
}
LINES = {  # label -> file and part of the measurement's name or the model's folder
    "softmax teacher": (TEXTS, "teacher"),
    "paper's recipe, 1024 tokens": (TEXTS, "paper_1024"),
    "lolcats-plus, 1024, own positions": (TEXTS, "lolcats_plus"),
    "lolcats-plus, 8192, own positions": (TEXTS, "plus_8192"),
    "a quarter of 1024 with a jump": (TEXTS_HORIZON, "1024 tokens, jump, quarter, seed 0: no linear_length_cap"),
    "lolcats-plus: this, linear_length_cap 1024": (
        TEXTS_HORIZON,
        "1024 tokens, jump, quarter, seed 0: linear_length_cap 1024",
    ),
    "lolcats-plus, 4096": (TEXTS_HORIZON, "4096 tokens, even jump, quarter, seed 0: linear_length_cap 4096"),
}
MAPS = {  # title -> file and label of its runs, or of its evaluation
    "paper's recipe\n1024 tokens": (LONG, "paper, 1024 tokens"),
    "paper's recipe\n8192 tokens": (LONG, "paper, 8192 tokens"),
    "lolcats-plus, 8192 tokens\nown positions": (LONG, "plus, 8192 tokens and feature maps"),
    "1024 tokens\nall moved, no jump": (POSITIONS, "1024 tokens, moved"),
    "1024 tokens\nall jump": (POSITIONS, "1024 tokens, jump"),
    "1024 tokens\na quarter jumps": (KEYS_HORIZON, "1024 tokens, jump, quarter: no linear_length_cap"),
    "lolcats-plus: this\nwith linear_length_cap 1024": (
        KEYS_HORIZON,
        "1024 tokens, jump, quarter: linear_length_cap 1024",
    ),
    "lolcats-plus\n4096 tokens": (KEYS_HORIZON, "4096 tokens, even jump, quarter: linear_length_cap 4096"),
}


def runs(folder: Path, file: str, label: str) -> list[dict[str, Any]]:
    """The rows of all seeds; of the file with all sweeps, those of the main comparison."""
    rows = [row for row in read_rows(folder / file) if row.get("sweep", "main") == "main"]
    return [row for row in rows if list(row["case"].values()) == [label]]


def seeds(rows: list[Any]) -> str:
    return f"{len(rows)} seed{'s' * (len(rows) > 1)}"


def stage_2(folder: Path) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    for (model, lines), axis in zip(CURVES.items(), figure.subplots(1, len(CURVES)), strict=True):
        for name, (file, label, color) in lines.items():
            curves = [dict(row["stages"]["adjust"]["curve"]) for row in runs(folder, file, label)]
            steps = [step for step in curves[0] if step >= 100]
            values = [[curve[step] for curve in curves] for step in steps]
            means = [statistics.fmean(each) for each in values]
            axis.plot(steps, means, color=color, marker=".", label=f"{name} ({seeds(curves)})")
            axis.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.25)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
        axis.set(title=model, xlabel="updates of stage 2", ylabel="validation perplexity")
    return figure


def models(report: Any, name: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Every entry with a model's positions, however deep in the report, with the keys above it and the folder."""
    if isinstance(report, list):
        return [each for part in report for each in models(part, name)]
    if not isinstance(report, dict):
        return []
    if "positions" in report:
        return [(f"{name} {report['model']}", report)]
    return [each for key, part in report.items() for each in models(part, f"{name} {key}")]


def passkeys(folder: Path, file: str, label: str) -> list[list[dict[str, Any]]]:
    """[seed][length] of an evaluation, or of runs that were evaluated."""
    if file.endswith(".json"):
        return [model["passkey"] for model in json.loads((folder / file).read_text())[label]["models"]]
    return [row["evaluation"]["passkey"] for row in runs(folder, file, label)]


def by_position(folder: Path) -> Figure:
    found = {file: models(json.loads((folder / file).read_text())) for file in {file for file, _ in LINES.values()}}
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for label, (file, name) in LINES.items():
        model = next(entry for where, entry in found[file] if name in where)
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
    return figure


def by_depth(folder: Path) -> Figure:
    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.subplots(1, len(MAPS), sharey=True)
    for (title, (file, label)), axis in zip(MAPS.items(), axes, strict=True):
        measured = passkeys(folder, file, label)
        lengths = [entry["length"] for entry in measured[0]]
        found = [[entry["deciles"] for entry in entries] for entries in measured]  # [seed][length][tenth]
        means = [
            [100 * statistics.fmean(seed[column][tenth] for seed in found) for column in range(len(lengths))]
            for tenth in range(10)
        ]
        image = axis.imshow(means, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
        axis.set_title(f"{title}\n({seeds(measured)})", fontsize=8)
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
        axis.set_yticks(range(10), [f"{10 * tenth}-{10 * tenth + 10} %" for tenth in range(10)], fontsize=8)
        axis.set_xlabel("tokens", fontsize=8)
    axes[0].set_ylabel("depth of the key")
    figure.colorbar(image, ax=axes, label="passkeys found, %")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="benchmarks/results")
    parser.add_argument("images", type=Path, help="docs/images")
    given = parser.parse_args()
    for name, draw in (("plus", stage_2), ("positions", by_position), ("passkeys", by_depth)):
        draw(given.results).savefig(given.images / f"{name}.png", dpi=130)


if __name__ == "__main__":
    main()
