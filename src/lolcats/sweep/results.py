"""The results of a sweep: one row per run in results.jsonl, and tables over seeds."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from rich.table import Table

from lolcats.analysis.files import EVALUATION_FILE, write_json, write_text
from lolcats.errors import UserError
from lolcats.report import STEPS, read_optional

RESULTS_FILE = "results.jsonl"


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a `results.jsonl`, oldest first; none if there is no such file.

    Raises:
        UserError: the file is damaged.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}; move it away to start the table anew") from error


def write_row(folder: Path, row: dict[str, Any]) -> None:
    """Add a row, or replace the one of the same run; the file is written whole or not at all."""
    rows = [other for other in read_rows(folder / RESULTS_FILE) if other["run"] != row["run"]]
    text = "".join(json.dumps(item) + "\n" for item in [*rows, row])
    write_text(folder / RESULTS_FILE, text)


def metrics_of(row: dict[str, Any], folder: Path) -> dict[str, float]:
    """All numbers of a finished run that a table can show: perplexities, held-out texts, and evaluations.

    Evaluations join here: whatever `lolcats eval` has left in the run's folder by the time of the call, or else
    what the row holds.
    """
    metrics = {f"perplexity {name}": value for name, value in row.get("perplexity", {}).items()}
    metrics |= {f"perplexity on {name}": value for name, value in row.get("held_out", {}).items()}
    measured = evaluation_of(folder / row["run"]) or row.get("evaluation", {})
    for entry in measured.get("passkey", []):
        metrics[f"passkey {entry['length']}"] = entry["accuracy"]
    return {key: float(value) for key, value in metrics.items() if value is not None} | flatten(measured)


def evaluation_of(output: Path) -> dict[str, Any]:
    """The row of a run's `eval.json` that is about this run; empty if there is none.

    Such a report holds several models, the teacher usually first: the one that names this folder counts, or
    else the last.
    """
    report = read_optional(output / EVALUATION_FILE)
    if not isinstance(report, dict):
        return {}
    models = [row for row in report.get("models", []) if isinstance(row, dict)]
    if not models:
        return report
    mine = [row for row in models if Path(str(row.get("model"))).name == output.name]
    return (mine or models)[-1]


def flatten(value: Any, name: str = "") -> dict[str, float]:
    """Numbers in nested mappings by the path to them, joined by spaces; text and lists are left out.

    A mapping with a number called "value" (beside its standard error, say) is that number.
    """
    if isinstance(value, dict):
        if isinstance(value.get("value"), int | float):
            return {name: float(value["value"])}
        nested = (flatten(item, f"{name} {key}".strip()) for key, item in value.items())
        return {path: number for part in nested for path, number in part.items()}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {name: float(value)}
    return {}


def summarise(rows: list[dict[str, Any]], folder: Path, order: list[dict[str, str]]) -> list[dict[str, Any]]:
    """One entry per case, in `order`: its seeds, failures, and mean, standard deviation and count of each metric.

    The standard deviation is that of a sample (n - 1), None for a single seed.
    """
    entries = []
    for case in order:
        mine = [row for row in rows if row["case"] == case]
        finished = sorted((row for row in mine if row["status"] == "finished"), key=lambda row: row["seed"])
        values: dict[str, list[float]] = {}
        for row in finished:
            for name, value in metrics_of(row, folder).items():
                values.setdefault(name, []).append(value)
        entries.append(
            {
                "case": case,
                "seeds": [row["seed"] for row in finished],
                "failed": [{"seed": row["seed"], "error": row["error"]} for row in mine if row["status"] == "failed"],
                "metrics": {name: _statistics(numbers) for name, numbers in values.items()},
            }
        )
    return entries


def write_tables(folder: Path, entries: list[dict[str, Any]]) -> None:
    """`table.json` and `table.md` beside the results."""
    write_json(folder / "table.json", entries)
    head, rows = _cells(entries)
    lines = [head, ["---"] * len(head), *rows]
    write_text(folder / "table.md", "".join(f"| {' | '.join(line)} |\n" for line in lines))


def rich_table(entries: list[dict[str, Any]], title: str) -> Table:
    """The same for the terminal."""
    head, rows = _cells(entries)
    axes = len(entries[0]["case"]) if entries else 0
    table = Table(title=title, title_justify="left")
    for place, name in enumerate(head):
        table.add_column(name, justify="left" if place < axes else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _cells(entries: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    axes = list(entries[0]["case"]) if entries else []
    found = dict.fromkeys(name for entry in entries for name in entry["metrics"])
    steps = [name for step in STEPS if (name := f"perplexity {step}") in found]
    names = [*steps, *(name for name in found if name not in steps)]
    rows = []
    for entry in entries:
        seeds = str(len(entry["seeds"])) + (f" ({len(entry['failed'])} failed)" if entry["failed"] else "")
        numbers = [_number(entry["metrics"].get(name)) for name in names]
        rows.append([*(entry["case"][axis] for axis in axes), seeds, *numbers])
    return [*axes, "seeds", *names], rows


def _number(value: dict[str, Any] | None) -> str:
    if value is None:
        return ""
    if value["std"] is None:
        return f"{value['mean']:.3f}"
    return f"{value['mean']:.3f}\u00a0±\u00a0{value['std']:.3f}"  # spaces at which no line breaks


def _statistics(values: list[float]) -> dict[str, Any]:
    finite = all(math.isfinite(value) for value in values)
    several = len(values) > 1 and finite
    return {
        "mean": statistics.fmean(values) if finite else math.inf,
        "std": statistics.stdev(values) if several else None,
        "count": len(values),
        "values": values,
    }
