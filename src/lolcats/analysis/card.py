"""What an output folder's files tell, as tables and charts at the end of its model card, which the hub shows."""

from __future__ import annotations

import re
from pathlib import Path

from lolcats.analysis.charts import layer_charts, map_chart, training_charts
from lolcats.errors import UserError
from lolcats.evaluation.tables import tables
from lolcats.report import (
    ANALYSIS_FILE,
    EVALUATION_FILE,
    REPORT_FILE,
    markdown_table,
    public_name,
    read_optional,
    read_report,
    write_text,
)

CARD_FILE, CHARTS = "README.md", "charts"
MARK = "<!-- lolcats report -->"
"""In the card, before what `lolcats report` writes."""


def write_card(folder: str | Path) -> Path:
    """Write evaluations (eval.json), training curves and layers (analysis.json) into the card; returns its path.

    Charts are pictures in `charts/`. What an earlier call wrote is replaced.
    """
    folder = Path(folder).expanduser()
    report, card = read_report(folder), folder / CARD_FILE
    if report is None or not card.is_file():
        raise UserError(f"{folder} has no {REPORT_FILE} and {CARD_FILE}; give the output folder of `lolcats linearize`")
    lines = [card.read_text(encoding="utf-8").partition(MARK)[0].rstrip("\n"), "", MARK, ""]
    evaluation = read_optional(folder / EVALUATION_FILE) or {}
    if models := evaluation.get("models"):
        named = [row | {"model": public_name(row["model"])} for row in models]
        for title, columns, rows in tables(evaluation | {"models": named}):
            lines += [f"## {title}", "", *markdown_table(columns, rows), ""]
    (folder / CHARTS).mkdir(exist_ok=True)
    analysis = read_optional(folder / ANALYSIS_FILE)
    maps = map_chart(analysis) if analysis else None
    for chart in [*training_charts(report), *layer_charts(report, analysis), *([maps] if maps else [])]:
        picture = f"{CHARTS}/{re.sub('[^a-z]+', '_', chart.title.lower())}.png"
        chart.figure.savefig(folder / picture, dpi=120)
        lines += [f"## {chart.title}", "", chart.note, "", f"![{chart.title}]({picture})", ""]
    write_text(card, "\n".join(lines))
    return card
