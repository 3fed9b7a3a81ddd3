"""`lolcats generate`: text from a linearized (or any other) model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lolcats.cli.console import notes
from lolcats.cli.console import quiet_loading_bars
from lolcats.errors import UserError


def generate(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a linearized model, or of any other.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Text to continue; repeatable.", show_default=False),
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option("--prompts-file", help="One prompt a line.", show_default=False)
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the tokenizer's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from this share of probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts generated together.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt on stdout.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    gguf_file: Annotated[
        str | None, typer.Option("--gguf-file", help="GGUF file inside MODEL.", show_default=False)
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with MODEL.")
    ] = False,
) -> None:
    """Generate text.

    Examples:

      lolcats generate out/ --prompt "The capital of France is"

      lolcats generate out/ --chat -p "Name three rivers." --temperature 0.7 --top-p 0.9
    """
    prompts = list(prompt or []) + _read_prompts(prompts_file)
    if not prompts:
        raise UserError("no prompt: give --prompt TEXT or --prompts-file FILE")
    quiet_loading_bars()
    from lolcats.evaluation.load import load_model
    from lolcats.generation.simple import generate_text

    loaded, tokenizer = load_model(
        model, dtype=dtype, device=device, trust_remote_code=trust_remote_code, gguf_file=gguf_file
    )
    with notes().status("generating"):
        answers = generate_text(
            loaded,
            tokenizer,
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            chat=chat,
            batch_size=batch_size,
        )
    for text, answer in zip(prompts, answers, strict=True):
        if as_json:
            typer.echo(json.dumps({"prompt": text, "text": answer}, ensure_ascii=False))
        else:
            # A continuation follows its prompt directly; an answer stands on its own line.
            typer.echo(f"{typer.style(text, bold=True)}{chr(10) if chat else ''}{answer}\n")


def _read_prompts(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --prompts-file {file}: {error}") from error
    return [line for line in lines if line.strip()]
