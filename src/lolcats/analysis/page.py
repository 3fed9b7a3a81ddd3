"""One HTML page about an output folder, complete in itself: no scripts, no network, no other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import yaml

from lolcats.analysis.charts import layer_charts, training_charts
from lolcats.errors import UserError
from lolcats.evaluation.tables import recall_tables, tables
from lolcats.report import (
    ANALYSIS_FILE,
    COST_COLUMNS,
    EVALUATION_FILE,
    REPORT_FILE,
    STEPS,
    cost_rows,
    markdown_table,
    plain,
    public_name,
    read_optional,
    read_report,
    write_text,
)

PAGE_FILE = "report.html"
CARD_FILE = "README.md"
CARD_MARK = "<!-- lolcats report: recall -->"
"""In the model card, before what `lolcats report` writes."""
TEMPLATE = Path(__file__).with_name("report.html")

Section = dict[str, Any]
"""id and title; optionally notes, tables (title, head, rows), charts, texts (title, text)."""


def write_page(folder: str | Path, output: Path | None = None) -> Path:
    """Write the page of `folder` to `output`, by default `folder/report.html`; returns where.

    Recall and RULER, where they were measured, are written at the end of the model card, too.

    Raises:
        UserError: there is no report in the folder, or a file cannot be read or written.
    """
    folder = Path(folder).expanduser()
    report = read_report(folder)
    if report is None:
        raise UserError(f"{folder} has no {REPORT_FILE}; give the output folder of `lolcats linearize`")
    evaluation = read_optional(folder / EVALUATION_FILE)
    page = render(folder.resolve().name, report, read_optional(folder / ANALYSIS_FILE), evaluation)
    card = folder / CARD_FILE
    measured = evaluation.get("models") or () if isinstance(evaluation, dict) else ()
    found = recall_tables([row | {"model": public_name(row["model"])} for row in measured]) if measured else []
    if found and card.is_file():
        before = card.read_text(encoding="utf-8").partition(CARD_MARK)[0].rstrip("\n")
        lines = [
            line for title, columns, rows in found for line in (f"## {title}", "", *markdown_table(columns, rows), "")
        ]
        write_text(card, "\n".join([before, "", CARD_MARK, "", *lines]))
    target = output or folder / PAGE_FILE
    write_text(target, page)
    return target


def render(name: str, report: dict[str, Any], analysis: dict[str, Any] | None = None, evaluation: Any = None) -> str:
    """The page as text.

    Args:
        name: of the model, for the heading.
        report: content of `lolcats_report.json`.
        analysis: content of `analysis.json`.
        evaluation: a report of `lolcats eval`.
    """
    sections = [_results(report)]
    if charts := training_charts(report):
        sections.append({"id": "training", "title": "Training", "charts": charts})
    if charts := layer_charts(report, analysis):
        notes = [] if analysis else ["More is shown here after `lolcats analyse DIR --data FILE`."]
        sections.append({"id": "layers", "title": "Layers", "charts": charts, "notes": notes})
    if evaluation:
        complete = isinstance(evaluation, dict) and evaluation.get("models")
        shown = {"tables": tables(evaluation)} if complete else {"texts": [("", _yaml(evaluation))]}
        sections.append({"id": "evaluation", "title": "Evaluation", **shown})
    settings = [(key, _yaml(report.get(key, {}))) for key in ("config", "data")]
    sections.append({"id": "configuration", "title": "Configuration and data", "texts": settings})
    origin = [("", _yaml(report.get("provenance", {})))]
    sections.append({"id": "provenance", "title": "Provenance", "texts": origin})
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(name=name, report=report, sections=sections)


def _results(report: dict[str, Any]) -> Section:
    perplexity = report.get("perplexity", {})
    last = next((key for key in ("adjust", "transfer", "swapped") if key in perplexity), None)
    notes = []
    if last is not None and "teacher" in perplexity:
        change = perplexity[last] / perplexity["teacher"] - 1
        notes = [f"Perplexity {STEPS[last]}: {change:+.1%} of the teacher's."]
    return {"id": "results", "title": "Results", "notes": notes, "tables": [("", COST_COLUMNS, cost_rows(report))]}


def _yaml(value: Any) -> str:
    return yaml.safe_dump(plain(value), sort_keys=False, allow_unicode=True, width=110)
