"""One HTML page about an output folder, complete in itself: no network, no other files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from lolcats.analysis.blocks import MOST_ROWS, Block, blocks_of, text
from lolcats.analysis.charts import STAGES, layer_charts, length_chart, map_chart, report_layer_charts, training_charts
from lolcats.analysis.files import ANALYSIS_FILE, EVALUATION_FILE, GENERATION_FILE, plain, write_text
from lolcats.analysis.output_error import worst_rows
from lolcats.errors import UserError
from lolcats.report import REPORT_FILE, STEPS, read_optional, read_report

TEMPLATE = Path(__file__).parent / "template"
PAGE_FILE = "report.html"


def write_page(folder: str | Path, output: Path | None = None) -> Path:
    """Write the page of `folder` to `output`, by default `folder/report.html`; returns where.

    Raises:
        UserError: there is no report in the folder, or a file cannot be read or written.
    """
    folder = Path(folder).expanduser()
    report = read_report(folder)
    if report is None:
        raise UserError(f"{folder} has no {REPORT_FILE}; give the output folder of `lolcats linearize`")
    page = render(
        folder.resolve().name,
        report,
        analysis=read_optional(folder / ANALYSIS_FILE),
        evaluation=read_optional(folder / EVALUATION_FILE),
        generation=read_optional(folder / GENERATION_FILE),
    )
    target = output or folder / PAGE_FILE
    write_text(target, page)
    return target


def render(
    name: str,
    report: dict[str, Any],
    *,
    analysis: dict[str, Any] | None = None,
    evaluation: Any = None,
    generation: Any = None,
) -> str:
    """The page as text.

    Args:
        name: of the model, for the heading.
        report: content of `lolcats_report.json`; the others of `analysis.json`, `eval.json`, `generation.json`.
    """
    training = training_charts(report)
    layers = layer_charts(analysis) if analysis else report_layer_charts(report)
    maps = map_chart(analysis) if analysis else None
    lengths = length_chart(evaluation)
    charts = [*training, *layers, *(chart for chart in (maps, lengths) if chart)]
    # "<" ends no script element early if it is written as an escape.
    data = json.dumps(plain({chart["id"]: chart for chart in charts}), allow_nan=False).replace("<", "\\u003c")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html").render(
        name=name,
        report=report,
        tiles=_tiles(report),
        perplexity=_perplexity_rows(report),
        training=training,
        layers=layers,
        maps=maps,
        analysis=analysis,
        ablations=_ablation_rows(analysis),
        worst=_worst_block(analysis),
        lengths=lengths,
        evaluation=_evaluation_blocks(evaluation),
        generation=_evaluation_blocks(generation),
        configuration=_configuration(report),
        data_used=blocks_of(report.get("data", {})),
        provenance=blocks_of(report.get("provenance", {})),
        style=Markup((TEMPLATE / "report.css").read_text(encoding="utf-8")),
        script=Markup((TEMPLATE / "report.js").read_text(encoding="utf-8")),
        data=Markup(data),
    )


def _tiles(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(label, value, remark) of the headline numbers."""
    perplexity, stages = report.get("perplexity", {}), report.get("stages", {})
    last = next((key for key in ("adjust", "transfer", "swapped") if key in perplexity), None)
    tiles = []
    if last is not None:
        tiles.append(("Perplexity", f"{perplexity[last]:.3f}", STEPS[last]))
    if "teacher" in perplexity:
        tiles.append(("Teacher", f"{perplexity['teacher']:.3f}", "softmax attention, untouched"))
        if last is not None:
            change = perplexity[last] / perplexity["teacher"] - 1
            tiles.append(("Difference", f"{change:+.1%}", "of the teacher's perplexity"))
    tokens, seconds = (sum(stage.get(key, 0) for stage in stages.values()) for key in ("tokens", "seconds"))
    if stages:
        tiles.append(("Training tokens", _short(tokens), f"in {len(stages)} stage{'s' if len(stages) > 1 else ''}"))
        tiles.append(("Training time", _duration(seconds), report.get("provenance", {}).get("device") or ""))
        peak = max(stage.get("peak_memory_gib", 0) for stage in stages.values())
        tiles.append(("Peak memory", f"{peak:.1f} GiB", ""))
    return tiles


def _perplexity_rows(report: dict[str, Any]) -> list[list[str]]:
    rows = []
    for key, label in STEPS.items():
        if key not in report.get("perplexity", {}):
            continue
        stage = report.get("stages", {}).get(key)
        row = [label, f"{report['perplexity'][key]:.3f}"]
        if stage is None:
            rows.append([*row, "", "", "", ""])
            continue
        costs = [f"{stage['tokens']:,}", _duration(stage["seconds"]), f"{stage['tokens_per_second']:,.0f}"]
        rows.append([*row, *costs, f"{stage['peak_memory_gib']:.2f}"])
    return rows


def _ablation_rows(analysis: dict[str, Any] | None) -> list[list[str]]:
    if not analysis:
        return []
    described = analysis.get("ablations_described", {})
    return [
        [described.get(name, name), text(value)] for name, value in analysis["ablations"].items() if value is not None
    ]


def _worst_block(analysis: dict[str, Any] | None) -> Block | None:
    if not (analysis and "worst" in analysis):
        return None
    stage = analysis["worst"]["stage"]
    head = ["rank", "layer", "error", "layer/head", "error"]
    return Block("table", f"Largest relative errors, {STAGES.get(stage, stage)}", head, worst_rows(analysis["worst"]))


def _evaluation_blocks(value: Any) -> list[Block]:
    """What `lolcats eval` measured; samples of several models side by side, origin and settings last."""
    if not (isinstance(value, dict) and isinstance(value.get("models"), list)):
        return blocks_of(value)
    rows = copy.deepcopy(value["models"])
    samples = [
        (row["model"], row["generation"].pop("samples")) for row in rows if "samples" in row.get("generation", {})
    ]
    for row in rows:
        row.get("esl", {}).pop("histogram", None)  # a chart shows it
    blocks = blocks_of(rows)
    if samples:
        cards = []
        for place, sample in enumerate(samples[0][1]):
            card = [(key, text(item)) for key, item in sample.items() if key != "text" and item is not None]
            cards.append(card + [(model, text(found[place]["text"])) for model, found in samples])
        blocks.append(Block("cards", "Samples", [], cards[:MOST_ROWS], max(len(cards) - MOST_ROWS, 0)))
    others = {key: item for key, item in value.items() if key not in ("models", "provenance")}
    return [*blocks, *blocks_of(others)]


def _configuration(report: dict[str, Any]) -> list[Block]:
    config = dict(report.get("config", {}))
    sources = config.get("data", {}).get("sources")
    blocks = blocks_of({key: value for key, value in config.items() if not isinstance(value, dict)})
    for section, values in config.items():
        if isinstance(values, dict):
            rows = [[key, text(value)] for key, value in values.items() if value is not sources or sources is None]
            blocks.append(Block("table", section, [], rows))
    return [*blocks, *(blocks_of(sources, "data / sources") if sources else [])]


def _short(number: float) -> str:
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:,.0f}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
