"""`lolcats generate`: text from a linearized (or any other) model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from lolcats.cli.console import notes
from lolcats.cli.options import ModelLoader, model_options
from lolcats.config import validated
from lolcats.errors import UserError


@model_options
def generate(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a linearized model, or of any other.")],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="Text to continue; repeatable.")] = None,
    prompts_file: Annotated[
        Path | None, typer.Option("--prompts-file", help='One prompt a line; or .jsonl: {"prompt": TEXT} a line.')
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the tokenizer's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from this share of probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts generated together.")] = 8,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of prompt and answer, if the model has exact heads.")
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

      lolcats generate out/ --prompts-file prompts.jsonl --batch-size 64 --json > answers.jsonl
    """
    from lolcats.evaluation.load import for_engine
    from lolcats.generation.engine import Engine
    from lolcats.generation.request import chat_text
    from lolcats.generation.sampling import SamplingParams

    prompts = [*(prompt or []), *(_read(prompts_file) if prompts_file else [])]
    if not prompts:
        raise UserError("no prompt: give --prompt TEXT or --prompts-file FILE with a line of text")
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    params = validated(SamplingParams, sampling)

    loaded, tokenizer = load(model)
    columns = ("generating", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Text for stdout goes around the bar on a terminal, and only there.
    bar = Progress(*columns, console=notes(), transient=True, redirect_stdout=sys.stdout.isatty())
    failed, slots = [], min(batch_size, len(prompts))
    with Engine(for_engine(loaded), tokenizer, max_slots=slots, max_length=max_length) as engine, bar:
        requests = []
        for index, text in enumerate(prompts):  # each samples its own random numbers
            try:
                tokens = engine.encode(chat_text(tokenizer, text) if chat else text, special=not chat)
                requests.append(engine.submit(tokens, params.changed(seed=seed + index), stream=False))
            except ValueError as error:
                raise UserError(f"prompt {index}: {error}") from error
        for index, request in enumerate(bar.track(requests)):
            result = request.result()
            if result.error is not None:
                failed.append(f"prompt {index}: {result.error}")
            if as_json:
                row = {"prompt": prompts[index], "text": result.text, "finish_reason": result.finish_reason}
                typer.echo(json.dumps(row, ensure_ascii=False))
            elif result.error is None:
                # A continuation follows its prompt directly; an answer stands on its own line.
                typer.echo(typer.style(prompts[index], bold=True) + "\n" * chat + result.text + "\n")
    if failed:
        raise UserError(f"{len(failed)} of {len(prompts)} prompts failed; {failed[0]}")


def _read(file: Path) -> list[str]:
    """The prompts of a file; other line separators than \\n belong to them."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --prompts-file {file}: {error}") from error
    lines = [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if file.suffix != ".jsonl":
        return [line for _, line in lines]
    prompts = []
    for number, line in lines:
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, TypeError, KeyError):
            prompt = None
        if not isinstance(prompt, str):
            raise UserError(f'{file}, line {number}: expected {{"prompt": TEXT}}, got {line[:100]}')
        prompts.append(prompt)
    return prompts
