"""One HTML page about an output folder, complete in itself: no scripts, no network, no other files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml

from lolcats.analysis.charts import (
    STAGES,
    Chart,
    cost_charts,
    layer_charts,
    length_chart,
    map_chart,
    recall_charts,
    training_charts,
)
from lolcats.analysis.diagnostics import worst_rows
from lolcats.analysis.files import ANALYSIS_FILE, EVALUATION_FILE, GENERATION_FILE, plain, write_text
from lolcats.errors import UserError
from lolcats.evaluation.tables import recall_tables, table_lines, tables
from lolcats.report import COST_COLUMNS, REPORT_FILE, STEPS, cost_rows, read_optional, read_report

PAGE_FILE = "report.html"
TEXT_SETTINGS = ("haystack", "seed", "limit")
"""Of `lolcats eval`: those that decide the texts of recall and RULER."""
CARD_FILE = "README.md"
CARD_MARK = "<!-- lolcats report: recall -->"
"""In the model card, before what `lolcats report` writes."""
TEMPLATE = Path(__file__).with_name("report.html")

Section = dict[str, Any]
"""id and title; optionally notes, tables (title, head, rows), charts, samples, texts (title, text)."""


def write_page(folder: str | Path, output: Path | None = None, beside: Sequence[Path] = ()) -> Path:
    """Write the page of `folder` to `output`, by default `folder/report.html`; returns where.

    Recall and RULER, where they were measured, are written at the end of the model card, too.

    Args:
        beside: reports of `lolcats eval` on other models, whose recall and RULER are shown beside the folder's.

    Raises:
        UserError: there is no report in the folder, or a file cannot be read or written.
    """
    folder = Path(folder).expanduser()
    report = read_report(folder)
    if report is None:
        raise UserError(f"{folder} has no {REPORT_FILE}; give the output folder of `lolcats linearize`")
    evaluation = with_recall_of(read_optional(folder / EVALUATION_FILE), beside)
    page = render(
        folder.resolve().name,
        report,
        analysis=read_optional(folder / ANALYSIS_FILE),
        evaluations={"Evaluation": evaluation, "Generation": read_optional(folder / GENERATION_FILE)},
    )
    card = folder / CARD_FILE
    found = recall_tables(evaluation["models"]) if isinstance(evaluation, dict) and evaluation.get("models") else []
    if found and card.is_file():
        before = card.read_text(encoding="utf-8").partition(CARD_MARK)[0].rstrip("\n")
        lines = [line for table in found for line in table_lines(table)]
        write_text(card, "\n".join([before, "", CARD_MARK, "", *lines]))
    target = output or folder / PAGE_FILE
    write_text(target, page)
    return target


def with_recall_of(evaluation: Any, others: Sequence[Path]) -> Any:
    """The report of `lolcats eval` with recall and RULER of the models in other such reports.

    Raises:
        UserError: one of them is none, or cannot be read.
    """
    own = evaluation if isinstance(evaluation, dict) and evaluation.get("models") else {"models": []}
    rows: list[dict[str, Any]] = []
    notes = []
    for file in others:
        other = read_optional(file)
        if not (isinstance(other, dict) and other.get("models")):
            raise UserError(f"{file} is no report of `lolcats eval`; write one with its --output")
        settings = [report.get("settings", {}) for report in (own, other)]
        differing = [name for name in TEXT_SETTINGS if own["models"] and settings[0].get(name) != settings[1].get(name)]
        notes += [f"{file.name} was measured in other texts: {name} {settings[1].get(name)}." for name in differing]
        rows += [{name: row[name] for name in ("model", "recall", "ruler") if name in row} for row in other["models"]]
    if not rows:
        return evaluation
    ours = {row["model"] for row in own["models"]}
    theirs = {row["model"]: row for row in rows if row["model"] not in ours}
    return own | {"models": [*own["models"], *theirs.values()], "notes": notes}


def render(
    name: str,
    report: dict[str, Any],
    *,
    analysis: dict[str, Any] | None = None,
    evaluations: dict[str, Any] | None = None,
) -> str:
    """The page as text.

    Args:
        name: of the model, for the heading.
        report: content of `lolcats_report.json`.
        analysis: content of `analysis.json`.
        evaluations: title -> report of `lolcats eval`, or None.
    """
    sections = [_results(report, analysis)]
    if charts := training_charts(report):
        sections.append({"id": "training", "title": "Training", "charts": charts})
    if charts := layer_charts(report, analysis):
        sections.append(_layers(charts, analysis))
    if analysis and (maps := map_chart(analysis)):
        sections.append({"id": "attention", "title": "Attention", "charts": [maps]})
    for title, found in (evaluations or {}).items():
        if found:
            sections.append(_evaluation(title, found))
    settings = [(key, _yaml(report.get(key, {}))) for key in ("config", "data")]
    sections.append({"id": "configuration", "title": "Configuration and data", "texts": settings})
    origin = [("", _yaml(report.get("provenance", {})))]
    sections.append({"id": "provenance", "title": "Provenance", "texts": origin})
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(name=name, report=report, sections=sections)


def _results(report: dict[str, Any], analysis: dict[str, Any] | None) -> Section:
    found = [("", COST_COLUMNS, cost_rows(report))]
    perplexity = report.get("perplexity", {})
    last = next((key for key in ("adjust", "transfer", "swapped") if key in perplexity), None)
    notes = []
    if last is not None and "teacher" in perplexity:
        change = perplexity[last] / perplexity["teacher"] - 1
        notes = [f"Perplexity {STEPS[last]}: {change:+.1%} of the teacher's."]
    if analysis:
        described = analysis.get("ablations_described", {})
        measured = {name: value for name, value in analysis["ablations"].items() if value is not None}
        rows = [[described.get(name, name), f"{value:.3f}"] for name, value in measured.items()]
        title = f"Perplexity without one part ({analysis['data']['label_tokens']:,} labelled tokens of the analysis)"
        found.append((title, [], rows))
    charts = cost_charts(analysis) if analysis else []
    return {"id": "results", "title": "Results", "notes": notes, "tables": found, "charts": charts}


def _layers(charts: list[Chart], analysis: dict[str, Any] | None) -> Section:
    section: Section = {"id": "layers", "title": "Layers", "charts": charts}
    if analysis is None:
        return section | {"notes": ["More is shown here after `lolcats analyse DIR --data FILE`."]}
    stage = analysis["worst"]["stage"]
    title = f"Largest errors relative to the mean square of the softmax outputs, {STAGES.get(stage, stage)}"
    table = (title, ["rank", "layer", "error", "layer/head", "error"], worst_rows(analysis["worst"]))
    return section | {"notes": analysis["notes"], "tables": [table]}


def _evaluation(title: str, found: Any) -> Section:
    """The tables of `lolcats eval`, and its samples side by side."""
    section: Section = {"id": title.lower(), "title": title}
    if not (isinstance(found, dict) and found.get("models")):
        return section | {"texts": [("", _yaml(found))]}
    charts = [*recall_charts(found), *([chart] if (chart := length_chart(found)) else [])]
    samples = [
        (row["model"], row["generation"]["samples"])
        for row in found["models"]
        if row.get("generation", {}).get("samples")
    ]
    shown = []
    for place, sample in enumerate(samples[0][1] if samples else []):
        texts = {"prompt": sample["prompt"], "reference": sample.get("answer")}
        texts |= {model: each[place]["text"] for model, each in samples}
        shown.append([(label, text) for label, text in texts.items() if text is not None])
    notes = found.get("notes", [])
    return section | {"notes": notes, "tables": tables(found), "charts": charts, "samples": shown}


def _yaml(value: Any) -> str:
    return yaml.safe_dump(plain(value), sort_keys=False, allow_unicode=True, width=110)
