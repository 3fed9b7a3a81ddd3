"""From a checked request to sequences for the engine: prompts as tokens, and limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lolcats.errors import UserError
from lolcats.generation.engine import Engine
from lolcats.generation.text import chat_text
from lolcats.serving.answers import ChatFormat, CompletionFormat, Format
from lolcats.serving.errors import ApiError
from lolcats.serving.schema import AnyRequest, ChatRequest, CompletionRequest
from lolcats.serving.sequences import Sequence
from lolcats.serving.settings import ServerSettings


@dataclass(frozen=True)
class Job:
    """What the engine is to do for one HTTP request, and how to tell of it.

    Attributes:
        groups: the answers to generate, those of one prompt together.
    """

    groups: list[list[Sequence]]
    format: Format


def prepare(request: AnyRequest, engine: Engine, settings: ServerSettings) -> Job:
    """Tokenize and check.

    Raises:
        ApiError: 400: no such tokens, no room for them, no chat template, ...
    """
    tokenizer = engine.tokenizer
    form: type[Format] = ChatFormat if isinstance(request, ChatRequest) else CompletionFormat
    echo = [""]
    try:
        if isinstance(request, ChatRequest):
            prompts = [engine.encode(_chat_text(tokenizer, request), special=False)]
        else:
            assert isinstance(request, CompletionRequest)
            prompts = [engine.encode(prompt) for prompt in request.prompts]
            echo = [_echo(tokenizer, prompt) if request.echo else "" for prompt in request.prompts]
    except ValueError as error:
        raise ApiError(400, str(error), param="prompt") from error
    if len(prompts) * request.n > settings.max_sequences:
        most = f"the {settings.max_sequences} answers that a request may have"
        raise ApiError(400, f"{len(prompts)} prompts with n={request.n} ask for more than {most}", param="n")
    room = max_length(engine, settings)
    groups = []
    for place, prompt in enumerate(prompts):
        new = _new_tokens(len(prompt), request.wanted_tokens, room, settings.max_tokens_limit)
        params = request.sampling(new)
        group = []
        for choice in range(request.n):
            # Answers to one prompt are to differ, though one seed was given.
            own = params if params.seed is None else replace(params, seed=params.seed + choice)
            group.append(Sequence(place * request.n + choice, prompt, own))
        groups.append(group)
    repeated = [text for text in echo for _ in range(request.n)]
    with_logprobs = request.wanted_logprobs is not None
    return Job(groups, form(tokenizer, settings.model_name, sum(map(len, prompts)), repeated, with_logprobs))


def max_length(engine: Engine, settings: ServerSettings) -> int | None:
    """Most tokens of prompt and answer; None: any number."""
    made_for = getattr(engine.model.config.get_text_config(), "max_position_embeddings", None)
    limits = (engine.runner.max_length, settings.max_length or made_for)
    return min((limit for limit in limits if limit is not None), default=None)


def _chat_text(tokenizer: Any, request: ChatRequest) -> str:
    if not getattr(tokenizer, "chat_template", None):
        message = "this model's tokenizer has no chat template; use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
    try:
        return chat_text(tokenizer, [message.for_template() for message in request.messages])
    except UserError as error:
        raise ApiError(400, str(error), param="messages") from error


def _echo(tokenizer: Any, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=True)


def _new_tokens(prompt_tokens: int, wanted: int | None, most: int | None, limit: int) -> int:
    """Most new tokens of a sequence.

    Args:
        most: tokens of prompt and answer.
        limit: new tokens that a request may ask for.

    Raises:
        ApiError: 400: more than this server gives, or no room beside the prompt.
    """
    if wanted is not None and not 1 <= wanted <= limit:
        raise ApiError(400, f"max_tokens={wanted}: expected an integer from 1 to {limit}", param="max_tokens")
    if most is None:
        return wanted or limit
    room = most - prompt_tokens
    if room < (wanted or 1):
        raise ApiError(
            400,
            f"{prompt_tokens} prompt tokens and {wanted or 1} new ones are more than the {most} that a request may"
            " have; shorten the prompt or lower max_tokens",
            param="prompt",
            code="context_length_exceeded",
        )
    return min(room, limit) if wanted is None else wanted
