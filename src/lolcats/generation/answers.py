"""Answers to many prompts through the engine, as they come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lolcats.generation.engine import Engine
from lolcats.generation.params import SamplingParams
from lolcats.generation.prompts import Prompt, chat_text, merged
from lolcats.generation.request import Result


def answer(
    engine: Engine, prompts: list[Prompt], params: SamplingParams, chat: bool
) -> Iterator[tuple[Prompt, Result]]:
    """Each prompt with its result, in the order in which they finish. What fails has the reason in its result.

    Args:
        params: for all prompts, under their own. Sampled prompts get different seeds, counted up from this one's.
        chat: put plain prompts into the chat template. Conversations always are.

    Raises:
        UserError: there is no chat template.
    """
    if any(chat or prompt.messages is not None for prompt in prompts):
        chat_text(engine.tokenizer, "")  # refuses before any work is done

    def requests() -> Iterator[tuple[int, tuple[Any, SamplingParams]]]:
        for index, prompt in enumerate(prompts):
            numbered = params if params.seed is None else replace(params, seed=params.seed + prompt.number)
            yield index, (prompt_tokens(engine.tokenizer, prompt, chat), merged(numbered, prompt.params))

    for index, result in engine.run(requests()):
        yield prompts[index], result


def prompt_tokens(tokenizer: Any, prompt: Prompt, chat: bool) -> list[int]:
    """Token ids of a prompt; a chat template writes the special tokens itself."""
    if chat or prompt.messages is not None:
        text = chat_text(tokenizer, prompt.text if prompt.messages is None else prompt.messages)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(prompt.text)["input_ids"])
