"""Evaluation reports as tables."""

from __future__ import annotations

import math
from typing import Any

from lolcats.evaluation.tasks import KNOWN_TASKS, PAPER_NAMES

Table = tuple[str, list[str], list[list[str]]]
"""Title, column names, rows."""

AVERAGES = {"average": "Avg.", "average_without_mmlu": "Avg. (no MMLU)"}


def add_averages(row: dict[str, Any]) -> None:
    """Put the paper's two averages into a model's row, where all of their tasks were measured.

    Their standard error takes the tasks as independent.
    """
    row["averages"] = {}
    for name in AVERAGES:
        tasks = [task for task in PAPER_NAMES if name == "average" or task != "mmlu"]
        if set(tasks) <= set(row["tasks"]):
            found = [row["tasks"][task] for task in tasks]
            errors = [item["stderr"] for item in found]
            row["averages"][name] = {
                "value": sum(item["value"] for item in found) / len(found),
                "stderr": None if None in errors else math.sqrt(sum(error**2 for error in errors)) / len(found),
            }


def tables(report: dict[str, Any]) -> list[Table]:
    """All tables of a report, each of the models for which it was measured."""
    rows = report["models"]
    having = {name: [row for row in rows if name in row] for name in ("attention", "tasks", "perplexity")}
    found = []
    if having["attention"]:  # the settings measured: some can be changed on a trained model (`AttentionConfig`)
        names = ("window", "window_size", "sinks", "feature_map", "linear_length_cap", "exact_window")
        settings = [(row["model"], [row["attention"].get(name) for name in names]) for row in having["attention"]]
        body = [[model, *("-" if value is None else str(value) for value in values)] for model, values in settings]
        found.append(("Attention as measured", ["model", *(name.replace("_", " ") for name in names)], body))
    if having["tasks"]:
        found.append(_task_table(having["tasks"], report["settings"]["limit"]))
    for name in ("recall", "ruler", "passkey"):
        if measured := [row for row in rows if name in row]:
            found.append(_recall_table(measured, name))
    if cells := [(row["model"], row["perplexity"]) for row in having["perplexity"]]:
        body = [[name, f"{x['perplexity']:.3f}", f"{x['loss']:.4f}", f"{x['tokens']:,}"] for name, x in cells]
        found.append(("Perplexity", ["model", "perplexity", "loss (nats/token)", "tokens"], body))
    lengths = [(row["model"], row["esl"]) for row in rows if "esl" in row]
    body = [[name, *(f"{esl[key]:.0f}" for key in ("mean", "std", "sequences"))] for name, esl in lengths]
    columns = ["model", "mean", "std", "sequences"]
    return found + ([("Effective sequence length (sum over queries, tokens)", columns, body)] if body else [])


def _task_table(rows: list[dict[str, Any]], limit: int | None) -> Table:
    scores = [row["tasks"] | row["averages"] for row in rows]
    titles = AVERAGES | {name: task.title for name, task in KNOWN_TASKS.items()}
    body = []
    lengths = rows[0].get("cache_bytes", {}) if all("cache_bytes" in row for row in rows) else {}
    for row, found in zip(rows, scores, strict=True):
        cells = [found[name] for name in scores[0]]
        sizes = [row["cache_bytes"][length] for length in lengths]
        body.append([row["model"], *(_number(cell["value"], cell["stderr"], digits=2) for cell in cells)])
        body[-1] += [f"{size / 2**20:.2f}" for size in sizes]
        if row is not rows[0]:
            pairs = [(cell["value"], first["value"]) for cell, first in zip(cells, scores[0].values(), strict=True)]
            shares = [f"{100 * value / base:.1f}" if base else "-" for value, base in pairs]
            shares += [f"{100 * size / base:.1f}" for size, base in zip(sizes, lengths.values(), strict=True)]
            body.append(["  difference", *(f"{100 * (x - base):+.2f}" for x, base in pairs), *[""] * len(sizes)])
            body.append(["  % of the Transformer", *shares])
    title = "Tasks (percent ± standard error)" + ("" if limit is None else f", first {limit} questions of each")
    caches = [f"MiB at {int(length) // 1024}k" for length in lengths]
    return (title, ["model", *(titles.get(name, name) for name in scores[0]), *caches], body)


def _recall_table(rows: list[dict[str, Any]], name: str) -> Table:
    lengths = sorted({item["length"] for row in rows for item in row[name]})
    body = []
    for kind in dict.fromkeys(item["kind"] for row in rows for item in row[name]):
        for row in rows:
            found = {item["length"]: item for item in row[name] if item["kind"] == kind}
            cells = [_number(found[n]["accuracy"], found[n]["stderr"]) if n in found else "-" for n in lengths]
            body.append([kind, row["model"], *cells])
    title = {"recall": "Recall", "ruler": "RULER", "passkey": "Passkeys"}[name]
    return (f"{title} (percent) by tokens of the text", ["task", "model", *map(str, lengths)], body)


def _number(value: float, stderr: float | None, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}" + ("" if stderr is None else f" ± {100 * stderr:.{digits}f}")
