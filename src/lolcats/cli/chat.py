"""`lolcats chat`: a conversation with a linearized model, whose state holds the earlier turns."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lolcats.cli.console import notes
from lolcats.cli.options import ModelLoader, model_options
from lolcats.config import validated
from lolcats.errors import UserError

if TYPE_CHECKING:
    from lolcats.generation.chat import Chat
    from lolcats.generation.sampling import SamplingParams

COMMANDS = "/reset, /quit"


@model_options
def chat(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a linearized model.")],
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Sample from this share of probability, above 0 to 1.")] = 0.9,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of the conversation, if the model has exact heads.")
    ] = None,
    *,
    load: ModelLoader,
) -> None:
    """Talk with a linearized model.

    The model's state holds the conversation: earlier turns are never read again, whatever their length.

    Ctrl-C ends an answer; /reset and /quit do what they say. Lines also come from a pipe.

    Examples:

      lolcats chat out/

      lolcats chat out/ --system "Answer in one sentence." --temperature 0
    """
    from lolcats.generation.chat import Chat
    from lolcats.generation.engine import Engine
    from lolcats.generation.sampling import SamplingParams

    params = validated(SamplingParams, {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p})
    loaded, tokenizer = load(model)
    # A thread of its own, so that Ctrl-C reaches this one at once.
    with Engine(loaded, tokenizer, max_slots=1, max_length=max_length) as engine:
        conversation = Chat(engine, system)
        if sys.stdin.isatty():
            notes().print(f"[dim]{COMMANDS}[/]", highlight=False)
        for line in _lines():
            if line == "/quit":
                break
            try:
                if line == "/reset":
                    conversation.reset()
                    notes().print("[dim]forgotten[/]")
                elif line.startswith("/"):
                    raise UserError(f"{line.split()[0]}: expected {COMMANDS}")
                else:  # every turn draws its own random numbers
                    turn = None if seed is None else seed + len(conversation.messages)
                    _answer(conversation, line, params.changed(seed=turn))
            except (UserError, ValueError) as error:
                notes().print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)


def _answer(conversation: Chat, text: str, params: SamplingParams) -> None:
    """Write an answer as it comes; Ctrl-C ends it."""
    out = Console()
    before = signal.signal(signal.SIGINT, lambda *_: conversation.cancel())
    try:
        for piece in conversation.ask(text, params):
            out.out(piece, end="", highlight=False)
    finally:
        signal.signal(signal.SIGINT, before)
    out.out("")
    if conversation.fed_again:
        notes().print("[dim]the chat template rewrites earlier turns: the conversation was read again[/]")


def _lines() -> Iterator[str]:
    """What the user types, or the lines of a pipe; without empty ones."""
    prompt = "[bold cyan]> [/]" if sys.stdin.isatty() else ""
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            if line := Console(file=sys.stderr).input(prompt).strip():
                yield line
