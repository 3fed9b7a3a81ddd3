"""What benchmarks/results_smollm2.py and quality_smollm2.py have measured, and the paper's numbers, in one form."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lolcats.sweep.results import metrics_of, read_rows

PAPER_FILE = Path(__file__).parent / "paper_numbers.json"
NOWHERE = Path("/nonexistent")  # rows hold their evaluations; there is no folder to look into
_ARMS = {"query_head": "LoLCATs"}  # of quality_smollm2.py: the paper's recipe

Mean = tuple[float, float | None, int]
"""Mean, standard deviation (None for a single run), and number of runs."""


@dataclass
class Results:
    """Everything that is known.

    Attributes:
        rows: of finished runs, each with its `sweep`.
        steps: name -> result, see results_smollm2.py.
        paper: table -> label, model, rows.
        files: what was read.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[str, Any] = field(default_factory=dict)
    paper: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def runs(self, sweep: str, case: str) -> list[dict[str, Any]]:
        """Rows of a sweep whose labels, joined by "|", are `case`."""
        return [row for row in self.rows if row["sweep"] == sweep and "|".join(row["case"].values()) == case]

    def metric(self, sweep: str, case: str, name: str) -> Mean | None:
        """A number of one row of a table, over its seeds; accuracies in percent."""
        if case == "teacher":
            values = self._teacher(name)
        else:
            found = [numbers_of(row) for row in self.runs(sweep, case)]
            if name == "perplexity transfer":  # without transfer, what there is before LoRA is the swapped model
                found = [{name: row.get("perplexity swapped"), **row} for row in found]
            values = [row[name] for row in found if row.get(name) is not None]
        if not values:
            return None
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values)

    def papers(self, table: str, case: str, name: str) -> Any:
        """The paper's number: a float, [mean, standard deviation], or None."""
        return self.paper.get(table, {}).get("rows", {}).get(case, {}).get(name)

    def _teacher(self, name: str) -> list[float]:
        if name == "perplexity adjust":  # the untouched model on the same validation split
            found = [row["perplexity"].get("teacher") for row in self.rows if row["sweep"] == "main"]
            return [value for value in found if value is not None][:1]
        if "teacher" not in self.steps:
            return []
        numbers = numbers_of({"perplexity": {}, "evaluation": self.steps["teacher"]["result"]["models"][0]})
        return [numbers[name]] if name in numbers else []


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """Metric -> value under the page's names: perplexities as they are, accuracies in percent by task."""
    found = {}
    for name, value in metrics_of({"run": "none", **row}, NOWHERE).items():
        for prefix in ("tasks ", "averages "):
            if name.startswith(prefix):
                name, value = name.removeprefix(prefix), 100 * value
        found[name] = 100 * value if name.startswith("passkey ") else value
    return found


def read_results(paths: list[Path]) -> Results:
    """Results from output folders of results_smollm2.py and from JSON files of quality_smollm2.py; later ones win."""
    results = Results(paper=json.loads(PAPER_FILE.read_text(encoding="utf-8"))["tables"])
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for path in paths:
        results.files.append(path.name)
        found = _of_folder(path, results) if path.is_dir() else _of_quality(path)
        rows |= {(row["sweep"], row["run"]): row for row in found if row["status"] == "finished"}
    results.rows = list(rows.values())
    return results


def _of_folder(folder: Path, results: Results) -> list[dict[str, Any]]:
    steps = folder / "steps.json"
    if steps.is_file():
        results.steps |= json.loads(steps.read_text(encoding="utf-8"))
    return read_rows(folder / "rows.jsonl")


def _of_quality(file: Path) -> list[dict[str, Any]]:
    """Runs of the paper's recipe as rows of the main comparison."""
    rows = []
    for name, result in json.loads(file.read_text(encoding="utf-8")).items():
        arm, _, seed = name.partition("-seed")
        if arm not in _ARMS:
            continue
        curves = {
            "transfer": result.get("transfer_perplexity_at_step", {}),
            "adjust": result["adjust_curve"],
        }
        stages = {
            stage: values | {"curve": [[int(step), value] for step, value in curves[stage].items()]}
            for stage, values in result["stages"].items()
        }
        row = {"sweep": "main", "run": f"{_ARMS[arm]}-seed{seed or 0}", "case": {"method": _ARMS[arm]}}
        rows.append(
            row
            | {"seed": int(seed or 0), "status": "finished", "perplexity": result["perplexity"], "stages": stages}
            | {"provenance": result["provenance"]}
        )
    return rows
