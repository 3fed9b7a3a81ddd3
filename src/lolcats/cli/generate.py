"""`lolcats generate`: text from a linearized (or any other) model."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from lolcats.cli.console import notes
from lolcats.cli.options import ModelLoader, model_options
from lolcats.errors import UserError


@model_options
def generate(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a linearized model, or of any other.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Text to continue; repeatable."),
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            "--prompts-file",
            help='One prompt a line; or .jsonl: {"prompt": ..., "id": ..., "temperature": ..., ...} a line.',
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write answers to this .jsonl file as they come."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an --output file.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the tokenizer's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from this share of probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts generated together.")] = 8,
    max_length: Annotated[
        int | None,
        typer.Option(min=2, help="Most tokens of prompt and answer, if the model has exact heads."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt on stdout.")] = False,
    *,
    load: ModelLoader,
) -> None:
    """Generate text.

    Models answer many prompts at a time: a finished one makes room for the next.

    Examples:

      lolcats generate out/ --prompt "The capital of France is"

      lolcats generate out/ --chat -p "Name three rivers." --temperature 0.7 --top-p 0.9

      lolcats generate out/ --prompts-file prompts.jsonl --output answers.jsonl --batch-size 64
    """
    if resume and output is None:
        raise UserError("--resume continues an --output file; name it")
    if not prompt and prompts_file is None:
        raise UserError("no prompt: give --prompt TEXT or --prompts-file FILE")
    from lolcats.evaluation.load import for_engine
    from lolcats.generation.engine import Engine
    from lolcats.generation.prompts import AnswerFile, answer_lines, read_prompts, record
    from lolcats.generation.sampling import user_params

    prompts = read_prompts(prompt or [], prompts_file)
    if not prompts:
        raise UserError(f"no prompt: {prompts_file} has no line with text")
    params = user_params(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)

    with nullcontext() if output is None else AnswerFile(output, resume) as file:
        finished = set() if file is None else file.finished
        waiting = [item for item in prompts if item.id not in finished]
        if not waiting:
            notes().print(f"all {len(prompts)} prompts have their answer already")
            return
        loaded, tokenizer = load(model)
        # Text for stdout goes around the bar on a terminal, and only there.
        bar = Progress(
            *("generating", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),
            console=notes(),
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        slots = min(batch_size, len(waiting))
        failed = []
        ready: dict[int, dict[str, Any]] = {}
        upcoming = list(waiting)
        with Engine(for_engine(loaded), tokenizer, max_slots=slots, max_length=max_length) as engine, bar:
            answers = answer_lines(engine, waiting, params, chat)
            for item, result in bar.track(answers, total=len(prompts), completed=len(finished)):
                values = record(item, result)
                if "error" in values:
                    failed.append(f"prompt {item.id}: {values['error']}")
                if file is not None:
                    file.write(values)
                    continue
                ready[item.number] = values
                while upcoming and upcoming[0].number in ready:  # on stdout, in their order
                    shown = upcoming.pop(0)
                    values = ready.pop(shown.number)
                    if as_json:
                        typer.echo(json.dumps({key: values[key] for key in ("prompt", "text")}, ensure_ascii=False))
                    elif "error" not in values:
                        # A continuation follows its prompt directly; an answer stands on its own line.
                        newline = "\n" if chat or shown.messages is not None else ""
                        typer.echo(f"{typer.style(shown.text, bold=True)}{newline}{values['text']}\n")
        if failed:
            raise UserError(f"{len(failed)} of {len(waiting)} prompts failed; {failed[0]}")
