"""Evaluation reports as tables: Markdown for documents, rows for the terminal."""

from __future__ import annotations

import math
from typing import Any

from lolcats.evaluation.tasks import PAPER_NAMES, PAPER_TASKS

Table = tuple[str, list[str], list[list[str]]]
"""Title, column names, rows."""

AVERAGES = {"average": "Avg.", "average_without_mmlu": "Avg. (no MMLU)"}


def add_averages(row: dict[str, Any]) -> None:
    """Put the paper's two averages into a model's row, where all of their tasks were measured.

    Their standard error takes the tasks as independent.
    """
    row["averages"] = {}
    for name, tasks in (
        ("average", PAPER_NAMES),
        ("average_without_mmlu", tuple(task for task in PAPER_NAMES if task != "mmlu")),
    ):
        if set(tasks) <= set(row["tasks"]):
            found = [row["tasks"][task] for task in tasks]
            errors = [item["stderr"] for item in found]
            known = all(error is not None for error in errors)
            row["averages"][name] = {
                "value": sum(item["value"] for item in found) / len(found),
                "stderr": math.sqrt(sum(error**2 for error in errors)) / len(found) if known else None,
            }


def tables(report: dict[str, Any]) -> list[Table]:
    """All tables of a report."""
    rows = report["models"]
    found = [_attention_table(rows)] if any("attention" in row for row in rows) else []
    if "tasks" in rows[0]:
        found.append(_task_table(rows, report["settings"]["limit"]))
    if "passkey" in rows[0]:
        found += [_passkey_table(row) for row in rows]
    if "generation" in rows[0]:
        found.append(_generation_table(rows))
    if "esl" in rows[0]:
        found.append(_esl_table(rows))
    return found


def markdown(report: dict[str, Any]) -> str:
    """The whole report as Markdown, samples included."""
    parts = ["# Evaluation", ""]
    for title, columns, rows in tables(report):
        parts += [f"## {title}", "", _row(columns), _row(["---", *["---:"] * (len(columns) - 1)])]
        parts += [*map(_row, rows), ""]
    if "generation" in report["models"][0]:
        parts += _samples(report["models"])
    origin = report["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items() if version)
    parts += [f"{origin['time']}, {origin['device']}, commit {origin['commit'] or 'unknown'}; {versions}."]
    return "\n".join(parts) + "\n"


def _attention_table(rows: list[dict[str, Any]]) -> Table:
    """What was measured: a cache and a cap can be given to a model that was trained without them."""
    names = ("window", "window_size", "sinks", "feature_map", "sparse_cache", "linear_length_cap")
    body = [
        [row["model"], *(str(row["attention"].get(name, "-")) for name in names)] for row in rows if "attention" in row
    ]
    return ("Attention as measured", ["model", *(name.replace("_", " ") for name in names)], body)


def _task_table(rows: list[dict[str, Any]], limit: int | None) -> Table:
    names = list(rows[0]["tasks"])
    averages = [name for name in AVERAGES if name in rows[0]["averages"]]
    titles = [PAPER_TASKS[name].title if name in PAPER_TASKS else name for name in names]
    columns = ["model", *titles, *(AVERAGES[name] for name in averages)]
    body = []
    for index, row in enumerate(rows):
        cells = [*(row["tasks"][name] for name in names), *(row["averages"][name] for name in averages)]
        body.append([row["model"], *(_score(cell) for cell in cells)])
        if index > 0:
            first = [*(rows[0]["tasks"][name] for name in names), *(rows[0]["averages"][name] for name in averages)]
            pairs = [(cell["value"], base["value"]) for cell, base in zip(cells, first, strict=True)]
            body.append(["  difference", *(f"{100 * (value - base):+.2f}" for value, base in pairs)])
            body.append(
                ["  % of the Transformer", *(f"{100 * value / base:.1f}" if base else "-" for value, base in pairs)]
            )
    title = "Tasks (percent ± standard error)"
    return (title if limit is None else f"{title}, first {limit} questions of each", columns, body)


def _passkey_table(row: dict[str, Any]) -> Table:
    columns = ["tokens", *(f"{10 * decile}%" for decile in range(10)), "all"]
    body = [
        [str(item["length"]), *(f"{100 * share:.0f}" for share in item["deciles"]), _score(item, 1)]
        for item in ({**entry, "value": entry["accuracy"]} for entry in row["passkey"])
    ]
    return (
        f"Passkey retrieval (percent) by depth, each column from its depth to the next, {row['model']}",
        columns,
        body,
    )


def _generation_table(rows: list[dict[str, Any]]) -> Table:
    spans = [item["span"] for item in next((r["generation"]["agreement"] for r in rows if _agrees(r)), [])]
    columns = ["model"]
    for span in spans:
        columns += [f"matching prefix of {span}", f"equal tokens of {span} (%)"]
    columns += ["repeated 4-grams (%)", "exact match (%)", "tokens"]
    body = []
    for row in rows:
        found = row["generation"]
        cells = [row["model"]]
        for place in range(len(spans)):
            if _agrees(row):
                item = found["agreement"][place]
                cells.append(f"{item['matching_prefix']:.1f}{_error(item['matching_prefix_stderr'], 1, 1)}")
                cells.append(f"{100 * item['equal_share']:.1f}{_error(item['equal_share_stderr'], 100, 1)}")
            else:
                cells += ["-", "-"]
        for name in ("repetition", "exact_match"):
            value = found[name]
            cells.append("-" if value is None else f"{100 * value:.1f}{_error(found[f'{name}_stderr'], 100, 1)}")
        body.append([*cells, f"{found['mean_tokens']:.0f}"])
    return (f"Greedy generation, {rows[0]['generation']['prompts']} prompts", columns, body)


def _agrees(row: dict[str, Any]) -> bool:
    return "agreement" in row["generation"]


def _esl_table(rows: list[dict[str, Any]]) -> Table:
    columns = ["model", "mean", "std", *(f"{10 * place}%" for place in range(11))]
    body = [
        [row["model"], *(f"{value:.0f}" for value in (row["esl"]["mean"], row["esl"]["std"], *row["esl"]["deciles"]))]
        for row in rows
    ]
    length = rows[0]["esl"]["sequence_length"]
    return (f"Effective sequence length of {length} tokens (sum over queries)", columns, body)


def _samples(rows: list[dict[str, Any]]) -> list[str]:
    parts = ["## Samples", ""]
    for index, sample in enumerate(rows[0]["generation"]["samples"]):
        parts += [f"### Prompt {index + 1}", "", _quote(sample["prompt"]), ""]
        if sample["answer"] is not None:
            parts += ["reference:", "", _quote(sample["answer"]), ""]
        for row in rows:
            parts += [f"{row['model']}:", "", _quote(row["generation"]["samples"][index]["text"]), ""]
    return parts


def _quote(text: str) -> str:
    # Indented by four, so that nothing in a model's text is taken as Markdown.
    return "\n".join(f"    {line}" for line in (text or " ").split("\n"))


def _score(cell: dict[str, Any], digits: int = 2) -> str:
    return f"{100 * cell['value']:.{digits}f}{_error(cell['stderr'], 100, digits)}"


def _error(value: float | None, factor: float, digits: int) -> str:
    return "" if value is None else f" ± {factor * value:.{digits}f}"


def _row(cells: list[str]) -> str:
    escaped = (cell.strip().replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
