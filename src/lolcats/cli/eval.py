"""`lolcats eval`: what a model still does, next to its original."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lolcats.cli.console import notes, results
from lolcats.cli.options import (
    DATA_OPTIONS,
    ModelLoader,
    Sources,
    config_options,
    data_section,
    model_options,
    settings_options,
)
from lolcats.config import validated
from lolcats.errors import UserError
from lolcats.evaluation.options import EvalOptions
from lolcats.report import table, without_paths, write_text


@settings_options(
    EvalOptions,
    *("tasks", "data_dir", "limit", "apply_chat_template", "run_code", "seed", "batch_size", "lengths", "haystack"),
)
@model_options
@config_options(*DATA_OPTIONS)
def evaluate(
    models: Annotated[
        list[str], typer.Argument(help="Folders or hub ids. The first is what the others are compared with.")
    ],
    teacher: Annotated[str | None, typer.Option(help="Compare with this model; it is measured too.")] = None,
    data: Sources = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the report to this .json file, after each evaluation.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON on stdout instead of tables.")] = False,
    *,
    load: ModelLoader,
    given: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Evaluate models side by side.

    Examples:

      lolcats eval HuggingFaceTB/SmolLM2-135M-Instruct out/ --tasks paper -o eval.json

      lolcats eval out/ --teacher TEACHER --tasks perplexity --data held_out.jsonl

      lolcats eval base out/ --tasks recall,gsm8k --lengths 1024,4096 --haystack books.jsonl
    """
    section = data_section(data, given) if data else None
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        what = "it is a folder" if output.is_dir() else f"there is no folder {output.parent}"
        raise UserError(f"cannot write {output}: {what}")
    from lolcats.evaluation.suite import evaluate_models
    from lolcats.evaluation.tables import tables

    options = validated(EvalOptions, settings | {"data": section, "model_options": load.keywords})
    paths = [*([] if teacher is None else [teacher]), *(path for path in models if path != teacher)]

    report: dict[str, Any] = {}

    def keep(measured: dict[str, Any]) -> None:
        nonlocal report
        report = measured
        if output is not None:
            write_text(output, json.dumps(without_paths(report), indent=2, ensure_ascii=False) + "\n")

    try:
        keep(evaluate_models(paths, load, options, note=partial(notes().print, markup=False), keep=keep))
    finally:  # what was measured until an error is shown, too
        if as_json and report:
            typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
        elif report:
            for title, columns, rows in tables(report):
                results().print(table(title, columns, rows))
