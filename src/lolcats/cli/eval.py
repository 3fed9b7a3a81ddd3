"""`lolcats eval`: what a model still does, next to its original."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lolcats.analysis.files import write_text
from lolcats.cli.console import progress, table
from lolcats.cli.options import ModelLoader, Sources, check_writable, config_options, data_section, model_options
from lolcats.errors import UserError
from lolcats.report import without_paths


@model_options
@config_options("sequence_length")
def evaluate(
    models: Annotated[
        list[str], typer.Argument(help="Folders or hub ids. The first is what the others are compared with.")
    ],
    tasks: Annotated[
        str,
        typer.Option(
            help="`paper` (PIQA, ARC-e, ARC-c, HellaSwag, WinoGrande, 5-shot MMLU), names of lm-eval tasks (humaneval,"
            " gsm8k, ...; `humaneval_4k`: behind 4k tokens of other code; `gsm8k_8shot`), `topics` (many-shot"
            " classification), `recall`, `ruler`, `passkey`, `esl`; separated by commas."
        ),
    ] = "paper",
    teacher: Annotated[str | None, typer.Option(help="Compare with this model; it is measured too.")] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="Folder with TASK/SPLIT.jsonl(.gz) instead of data from the hub.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first questions of each task (each MMLU subject), or texts.")
    ] = None,
    apply_chat_template: Annotated[
        bool | None,
        typer.Option(help="Ask all lm-eval tasks in the chat template, or none. Default: those that generate."),
    ] = None,
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Run programs that the model writes (humaneval, mbpp): no sandbox.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of passkeys and of drawn examples.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Most contexts or answers at a time.")] = 256,
    lengths: Annotated[
        str | None, typer.Option(help="recall, ruler (1024 to 8192), passkey (2048 to 10240): tokens of the texts.")
    ] = None,
    haystack: Annotated[
        str, typer.Option(help="recall, ruler: data source with the text around; `demo`: shipped textbooks.")
    ] = "demo",
    data: Sources = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the report to this .json file, after each evaluation.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON on stdout instead of tables.")] = False,
    *,
    load: ModelLoader,
    given: dict[str, Any],
) -> None:
    """Evaluate models side by side.

    Examples:

      lolcats eval HuggingFaceTB/SmolLM2-135M-Instruct out/ --tasks paper -o eval.json

      lolcats eval out/ --teacher Qwen/Qwen2.5-Coder-0.5B-Instruct --tasks humaneval,humaneval_4k,gsm8k --run-code

      lolcats eval base out/ --tasks recall,ruler --lengths 1024,4096 --haystack books.jsonl
    """
    section = data_section(data, given) if data else None
    check_writable(output)
    from lolcats.evaluation.suite import EvalOptions, check, evaluate_models, expand_tasks
    from lolcats.evaluation.tables import tables

    options = EvalOptions(
        tasks=expand_tasks(tasks),
        data_dir=data_dir,
        chat=apply_chat_template,
        run_code=run_code,
        limit=limit,
        seed=seed,
        batch_size=batch_size,
        lengths=None if lengths is None else _numbers("--lengths", lengths),
        haystack=haystack,
        data=section,
        model_options=load.given,
    )
    check(options)
    paths = [*([] if teacher is None else [teacher]), *(path for path in models if path != teacher)]

    def keep(report: dict[str, Any]) -> None:
        if output is not None:
            write_text(output, json.dumps(without_paths(report), indent=2, ensure_ascii=False) + "\n")

    with progress() as bar:
        report = evaluate_models(
            paths,
            load,
            options,
            progress=lambda path, part: bar(f"{Path(path).name}: {part}"),
            keep=keep,
        )
    keep(report)
    if as_json:
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
        return
    console = Console(width=None if sys.stdout.isatty() else 240)  # a file has no edge to wrap at
    for title, columns, rows in tables(report):
        console.print(table(title, columns, rows))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"{option} {text}: expected numbers separated by commas, for example 2048,4096") from error
