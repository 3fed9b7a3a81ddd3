"""The tables and pictures of docs/results.md, from its runs and the paper's numbers (paper_numbers.json).

    python benchmarks/results.py benchmarks/results/smollm2_h200_2026-11-21

Each table stands between comments with its name; the text around them is written by hand. The folder holds
`rows.jsonl`, a line for each run of `lolcats sweep`, with its `sweep`, and `steps.json`, the reports of `lolcats eval`
and `lolcats analyse` by name.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

HERE = Path(__file__).parent
PAPER = json.loads((HERE / "paper_numbers.json").read_text(encoding="utf-8"))["tables"]
TASKS = {
    "piqa": "PIQA",
    "arc_easy": "ARC-e",
    "arc_challenge": "ARC-c (norm)",
    "hellaswag": "HellaSwag (norm)",
    "winogrande": "WinoGrande",
    "mmlu": "MMLU (5-shot)",
    "average": "Avg.",
    "average_without_mmlu": "Avg. (no MMLU)",
}
ZERO_SHOT = {name: title for name, title in TASKS.items() if name not in ("mmlu", "average")}
BEFORE, AFTER = {"perplexity transfer": "perplexity before LoRA"}, {"perplexity adjust": "perplexity"}
OURS, BASELINE = "LoLCATs-seed0", "Hedgehog-seed0"


@dataclass(frozen=True)
class ResultTable:
    """Rows are runs of a sweep by their labels, joined by "|", or "teacher"; columns are names of `numbers_of`.

    papers: tables of paper_numbers.json; the first that has a number counts.
    """

    rows: dict[str, str]
    columns: dict[str, str]
    papers: tuple[str, ...] = ()


def same(*labels: str) -> dict[str, str]:
    return {label: label for label in labels}


def product(first: dict[str, str], second: dict[str, str]) -> dict[str, str]:
    return {f"{a}|{b}": f"{name}, {more}" for a, name in first.items() for b, more in second.items()}


PARTS = {
    f"{transfer}|{window}": f"{'' if transfer == 'yes' else 'no '}transfer, {'no ' if window == 'none' else ''}window"
    for transfer, window in (("no", "none"), ("yes", "none"), ("no", "64"), ("yes", "64"))
}
TABLES = {  # by sweep
    "main": ResultTable(
        {"teacher": "SmolLM2 135M Instruct (softmax)"}
        | same("softmax + LoRA", "T2R", "Hedgehog", "SUPRA", "no transfer", "window only", "LoLCATs"),
        AFTER | TASKS,
        ("main", "main-no-transfer", "main-supra", "seeds"),
    ),
    "components": ResultTable(
        product({"hedgehog": "Hedgehog", "t2r": "T2R"}, PARTS),
        BEFORE | AFTER | TASKS,
        ("components", "components-perplexity"),
    ),
    "windows": ResultTable(same("4", "16", "64", "256", "terraced 64"), AFTER | TASKS, ("windows",)),
    "lora-rank": ResultTable(
        same("4", "8", "16", "32", "64", "128", "192", "256") | {"full": "all weights"}, AFTER | TASKS, ("lora-rank",)
    ),
    "lora-projections": ResultTable(
        same("q", "k", "v", "o", "qk", "qv", "qo", "kv", "ko", "vo", "qkv", "qko", "kvo", "qkvo"),
        AFTER | ZERO_SHOT,
        ("lora-projections",),
    ),
    "data": ResultTable(
        same("instructions", "textbooks", "books", "mixed"),
        {f"perplexity on {name}": f"perplexity on {name}" for name in ("instructions", "textbooks", "books")} | TASKS,
        ("data",),
    ),
    "transfer-steps": ResultTable(
        same(*map(str, range(0, 2000, 200))),
        AFTER
        | {"perplexity on text": "perplexity on other text", "average_without_mmlu": TASKS["average_without_mmlu"]},
        ("transfer-steps",),
    ),
    "softmax-layers": ResultTable(
        {"teacher": "all"}
        | product(
            same("first half", "last half", "every second", "none"),
            {"transfer only": "transfer only", "both": "both stages"},
        ),
        BEFORE | AFTER | TASKS,
        ("softmax-layers",),
    ),
    "passkey": ResultTable(
        same("teacher") | product(same("instructions", "passkeys"), {"2048": "2048 tokens", "8192": "8192 tokens"}),
        {"passkey 2048": "2048 tokens", "passkey 8192": "8192 tokens"},
        ("passkey",),
    ),
    "blocks": ResultTable(
        {"none": "all layers jointly"} | {size: f"blocks of {size}" for size in ("15", "10", "5", "2", "1")},
        BEFORE | AFTER,
        ("blocks",),
    ),
}


@dataclass(frozen=True)
class Results:
    """Finished runs, and the reports of `lolcats eval` and `lolcats analyse` by name."""

    rows: list[dict[str, Any]]
    steps: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Results:
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
        steps = json.loads((folder / "steps.json").read_text(encoding="utf-8"))
        return cls([row for row in rows if row["status"] == "finished"], steps)

    def of(self, sweep: str, case: str) -> list[dict[str, float]]:
        """The numbers of a table's row, one entry a seed."""
        if case == "teacher":  # its perplexity is that on the validation sequences of the main comparison
            numbers = numbers_of({"evaluation": self.steps["teacher"]["result"]["models"][0]})
            found = next((row["perplexity"]["teacher"] for row in self.rows if row["sweep"] == "main"), None)
            return [numbers | ({} if found is None else {"perplexity adjust": found})]
        runs = [row for row in self.rows if row["sweep"] == sweep and "|".join(row["case"].values()) == case]
        return [numbers_of(row) for row in runs]


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """ "perplexity STAGE", "perplexity on TEXT"; accuracies in percent by task or "passkey LENGTH"."""
    stages = {name: value for name, value in row.get("perplexity", {}).items() if value is not None}
    if "swapped" in stages:  # before LoRA, where nothing is transferred
        stages.setdefault("transfer", stages["swapped"])
    texts = {f"on {name}": value for name, value in row.get("held_out", {}).items()}
    found = {f"perplexity {name}": value for name, value in (stages | texts).items()}
    measured = row.get("evaluation", {})
    for name, cell in (measured.get("tasks", {}) | measured.get("averages", {})).items():
        found[name] = 100 * cell["value"]
    return found | {f"passkey {cell['length']}": 100 * cell["accuracy"] for cell in measured.get("passkey", [])}


def table(name: str, results: Results) -> list[str]:
    """Markdown lines: `ours / the paper's` in each cell."""
    shown = TABLES[name]
    lines = [f"| {' | '.join(['', *shown.columns.values()])} |", "|---" * (len(shown.columns) + 1) + "|"]
    for case, title in shown.rows.items():
        seeds = results.of(name, case)
        cells = [title if seeds else f"{title} (not measured)"]
        for column in shown.columns:
            ours = _number([seed[column] for seed in seeds if column in seed])
            known = (PAPER[paper]["rows"].get(case, {}).get(column) for paper in shown.papers)
            paper = _papers_number(next((value for value in known if value is not None), None))
            cells.append("-" if ours == paper == "-" else f"{ours} / {paper}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _number(values: list[float]) -> str:
    if not values:
        return "-"
    mean = statistics.fmean(values)
    digits = 2 if mean < 1000 else 0
    return f"{mean:.{digits}f}" + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def _papers_number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value[0]:g} ± {value[1]:g}" if isinstance(value, list) else f"{value:g}"


def generation(results: Results) -> list[str]:
    """Agreement with the teacher's greedy text."""
    columns = ["matching prefix of 64", "equal tokens of 256 (%)", "repeated 4-grams (%)", "exact match (%)"]
    lines = ["| model | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in results.steps["generation"]["result"]["models"]:
        found = row["generation"]
        agreement = found.get("agreement")
        cells = ["-", "-"]
        if agreement:
            cells = [f"{agreement[0]['matching_prefix']:.1f}", f"{100 * agreement[-1]['equal_share']:.1f}"]
        cells += [f"{100 * found['repetition']:.1f}", f"{100 * found['exact_match']:.1f}"]
        lines.append(f"| {Path(row['model']).name} | {' | '.join(cells)} |")
    return lines


def provenance(results: Results) -> list[str]:
    counts = Counter((row["provenance"]["device"], str(row["provenance"]["commit"])[:12]) for row in results.rows)
    lines = [f"- Runs on {device} at commit {commit}: {count}." for (device, commit), count in sorted(counts.items())]
    for name, step in sorted(results.steps.items()):
        origin = step["result"]["provenance"]
        lines.append(f'- The step "{name}" on {origin["device"]} at commit {str(origin["commit"])[:12]}.')
    return lines


def fill(page: str, results: Results) -> str:
    """The page with new lines between its comments `<!-- NAME -->` and `<!-- /NAME -->`."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        own = {"generation": generation, "provenance": provenance}
        lines = own[name](results) if name in own else table(name, results)
        return "\n".join([f"<!-- {name} -->", *lines, f"<!-- /{name} -->"])

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->", block, page, flags=re.DOTALL)


def curves(results: Results) -> Figure:
    """Validation perplexity of seed 0: both stages, and stage 2 again where perplexities are near the teacher's."""
    drawn = [row for row in results.rows if row["sweep"] == "main" and row["seed"] == 0]
    drawn = [row for row in drawn if any(stage.get("curve") for stage in row["stages"].values())]
    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = (("transfer", "attention transfer"), ("adjust", "LoRA"), ("adjust", "LoRA, the lowest perplexities"))
    axes = figure.subplots(1, len(panels))
    for (stage, title), axis in zip(panels, axes, strict=True):
        for color, row in enumerate(drawn):
            curve = row["stages"].get(stage, {}).get("curve", [])
            axis.plot(*([*zip(*curve, strict=True)] or [[], []]), color=f"C{color}", marker=".", markersize=4)
        axis.set(title=title, xlabel="updates", ylabel="perplexity", yscale="log")
        axis.grid(alpha=0.3, which="both")
    teacher = results.of("main", "teacher")[0]["perplexity adjust"]
    axes[-1].axhline(teacher, color="black", linewidth=1, linestyle="--")
    axes[-1].set(yscale="linear", ylim=(0.75 * teacher, 1.35 * teacher))
    names = [", ".join(row["case"].values()) for row in drawn]
    lines = [Line2D([], [], color=f"C{color}", marker=".") for color in range(len(names))]
    figure.legend([*lines, Line2D([], [], color="black", linestyle="--")], [*names, "teacher"], loc="outside right")
    return figure


def layers(results: Results) -> Figure:
    """Output error by layer and stage, of two methods."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for run, style in ((OURS, "-"), (BASELINE, "--")):
        analysis = results.steps[f"analysis {run}"]["result"]
        for color, (stage, errors) in enumerate(analysis["mse"].items()):
            axis.plot(analysis["layers"], errors, style, color=f"C{color}", marker=".", label=f"{run}: {stage}")
    axis.set(xlabel="layer", ylabel="mean squared error", yscale="log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def maps(results: Results) -> Figure:
    """Attention weights of head 0: a row a layer, a column a stage."""
    analysis = results.steps[f"analysis {OURS}"]["result"]
    entries = [entry for entry in analysis["maps"]["maps"] if entry["head"] == 0]
    stages = ["softmax", *analysis["stages"]]
    figure = Figure(figsize=(3 * len(stages), 1.8 * len(entries)), layout="constrained")
    grid = figure.subplots(len(entries), len(stages), squeeze=False)
    for entry, row in zip(entries, grid, strict=True):
        values = sorted(value for line in entry["softmax"] for value in line)
        high = max(values[int(0.99 * (len(values) - 1))], 1e-6)  # one bright cell does not darken all others
        for stage, axis in zip(stages, row, strict=True):
            axis.imshow(entry[stage], aspect="auto", cmap="magma", vmin=0.0, vmax=high)
            axis.set(xticks=[], yticks=[])
            axis.set_title(f"layer {entry['layer']}: {stage}", fontsize=8)
    return figure


def lengths(results: Results) -> Figure:
    """Histograms of the effective sequence length, one line a source."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axis = figure.subplots()
    for name, step in results.steps.items():
        if name.startswith("esl "):
            esl = step["result"]["models"][0]["esl"]
            shares = [count / esl["sequences"] for count in esl["histogram"]["counts"]]
            label = f"{name.removeprefix('esl ')} (mean {esl['mean']:,.0f})"
            axis.stairs(shares, esl["histogram"]["edges"], label=label)
    axis.set(xlabel="effective sequence length (sum over queries, tokens)", ylabel="share of sequences")
    axis.legend(fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs", help="folder of results.md and images/")
    given = parser.parse_args()
    results = Results.read(given.folder)
    page = given.docs / "results.md"
    page.write_text(fill(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    for name, draw in (("curves", curves), ("layers", layers), ("maps", maps), ("esl", lengths)):
        draw(results).savefig(given.docs / "images" / f"results_{name}.png", dpi=130)


if __name__ == "__main__":
    main()
