"""From an HTTP request to its response: limits, admission, the engine, and the end of the server."""

from __future__ import annotations

import asyncio
import functools
import hmac
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lolcats.errors import UserError
from lolcats.generation.engine import Engine
from lolcats.generation.queue import QueueFull
from lolcats.generation.request import Handle, Piece, Result
from lolcats.generation.sampling import SamplingParams
from lolcats.generation.text import chat_text
from lolcats.serving.answers import ChatFormat, CompletionFormat
from lolcats.serving.http import EventStream, read_body, unless_disconnected
from lolcats.serving.metrics import Metrics
from lolcats.serving.protocol import ApiError, ChatRequest, CompletionRequest, OpenAIRequest, parse
from lolcats.serving.settings import ServerSettings

_CANCEL_S = 5.0  # in which cancelled requests get their last answer


class Service:
    """Answers requests over one engine.

    Attributes:
        draining: no new requests are taken.
    """

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine, self.settings = engine, settings
        self.metrics = Metrics(engine)
        self.draining = False
        self._open: set[Choices] = set()
        self._all_closed = asyncio.Event()

    # --- requests ------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """Refuse requests without the key, and all when the server is ending.

        Raises:
            ApiError: 401, 503.
        """
        if self.settings.api_key is not None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            # Headers are read as Latin-1, keys written as UTF-8.
            right = hmac.compare_digest(given.encode("latin-1"), self.settings.api_key.encode())
            if scheme.lower() != "bearer" or not right:
                raise ApiError(401, "wrong or missing API key; expected Authorization: Bearer KEY", code="invalid_key")
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"retry-after": "5"})
        if self.metrics.open_requests > self.settings.max_connections:
            headers = {"retry-after": "1", "connection": "close"}
            raise ApiError(503, "too many requests are open; try again later", code="overloaded", headers=headers)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 unless `name` is the model that is served; None is."""
        if name not in (None, self.settings.model_name):
            message = f"no model {name!r}; this server has {self.settings.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def answer(self, http: Request, kind: type[OpenAIRequest]) -> Response:
        """The answer to one request of `kind`.

        Raises:
            ApiError: whatever is wrong with it.
        """
        start = time.monotonic()
        body = await read_body(http, self.settings.max_body_bytes, self.settings.body_timeout_s)
        # In threads: large bodies and long prompts take a while.
        request = await asyncio.to_thread(parse, kind, body)
        self.check_model(request.model)
        prompts, params, form = await asyncio.to_thread(prepare, request, self.engine, self.settings)
        choices = Choices(self.engine, self.settings.request_timeout, self.metrics)
        self._open.add(choices)
        queued = asyncio.to_thread(choices.submit, prompts, params, request.n, request.stream)
        if request.stream:
            try:
                await unless_disconnected(http, queued)
            except BaseException:
                self._close(choices)
                raise
            usage = request.stream_options is not None and request.stream_options.include_usage
            return EventStream(self._chunks(choices, form, usage, start), lambda: self._close(choices))
        try:
            results = await unless_disconnected(http, _results(choices, queued))
        finally:
            self._close(choices)
        return JSONResponse(form.whole(results))

    async def _chunks(
        self, choices: Choices, form: CompletionFormat, usage: bool, start: float
    ) -> AsyncIterator[dict[str, Any]]:
        for chunk in form.first():
            yield chunk
        waiting = True
        async for index, event in choices.events():
            if waiting:
                self.metrics.first_token_seconds.observe(time.monotonic() - start)
                waiting = False
            yield form.last(index, event) if isinstance(event, Result) else form.piece(index, event)
        if usage:
            yield form.usage_chunk()

    # --- the end -------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Take no more requests, wait for those that run, and cancel what still runs after the deadline."""
        self.draining = True
        if not self._open:
            return
        try:
            await asyncio.wait_for(self._all_closed.wait(), self.settings.drain_timeout)
        except asyncio.TimeoutError:
            for choices in self._open:
                choices.close()
            with suppress(asyncio.TimeoutError):  # a client that does not read holds its stream open
                await asyncio.wait_for(self._all_closed.wait(), _CANCEL_S)

    def _close(self, choices: Choices) -> None:
        choices.close()
        self._open.discard(choices)
        if self.draining and not self._open:
            self._all_closed.set()


Event = Piece | Result


class Choices:
    """The choices of one HTTP request: they share a deadline, and end together when one fails.

    The engine's callbacks put events into an asyncio queue; the deadline puts its error there too.

    Args:
        timeout_s: seconds until the deadline.
        metrics: counts tokens.
    """

    def __init__(self, engine: Engine, timeout_s: float, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event | ApiError]] = asyncio.Queue()
        self._handles: list[Handle] = []
        self._unfinished = 0
        self._closed = False
        late = ApiError(504, f"the answer was not finished after {timeout_s:g} s", code="timeout")
        self._timer = self._loop.call_later(timeout_s, self._events.put_nowait, (-1, late))

    def submit(self, prompts: list[list[int]], params: list[SamplingParams], n: int, stream: bool) -> None:
        """Queue `n` choices of each prompt, numbered through. Takes a while: not for the event loop's thread.

        Args:
            params: of each prompt; the k-th choice uses `seed` + k, for answers to one prompt are to differ.

        Raises:
            ApiError: 400 what the engine refuses, 429 its queue is full, 503 it is shut down.
        """
        try:
            for index in range(n * len(prompts)):
                tokens, item, choice = prompts[index // n], params[index // n], index % n
                on_event = functools.partial(self._on_event, index, len(tokens))
                handle = self._engine.submit(
                    tokens,
                    item if item.seed is None else item.changed(seed=item.seed + choice),
                    stream=False,
                    on_piece=on_event if stream else None,
                    on_finish=on_event,
                )
                self._handles.append(handle)
                self._unfinished += 1
                if self._closed:
                    handle.cancel()
        except QueueFull as error:
            raise ApiError(429, str(error), code="queue_full", headers={"retry-after": "1"}) from error
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        except RuntimeError as error:
            raise ApiError(503, str(error), code="shutting_down") from error

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(choice, event); each choice's pieces, then its result.

        Raises:
            ApiError: 500 the model failed, 503 cancelled by the server, 504 the deadline.
        """
        while self._unfinished:
            index, event = await self._events.get()
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, Result):
                self._unfinished -= 1
                if event.finish_reason == "error":
                    raise ApiError(500, f"the model failed: {event.error}", code="model_error")
                if event.finish_reason == "cancelled":
                    raise ApiError(503, "the server is shutting down", code="shutting_down")
            yield index, event

    def close(self) -> None:
        """End what is unfinished or is being queued; its slots are free after the engine's next step."""
        self._timer.cancel()
        self._closed = True
        for handle in self._handles:
            if not handle.done:
                handle.cancel()

    def _on_event(self, index: int, prompt_tokens: int, event: Event) -> None:
        """The engine's callback."""
        if isinstance(event, Result):
            self._metrics.count_tokens(prompt_tokens, len(event.token_ids))
        self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))


async def _results(choices: Choices, queued: Awaitable[None]) -> list[Result]:
    await queued
    results = {index: event async for index, event in choices.events() if isinstance(event, Result)}
    return [results[index] for index in sorted(results)]


def prepare(
    request: OpenAIRequest, engine: Engine, settings: ServerSettings
) -> tuple[list[list[int]], list[SamplingParams], CompletionFormat]:
    """Tokenize and check: the prompts, the parameters of each, and the format of the response.

    Raises:
        ApiError: 400: no such tokens, no room for them, no chat template, ...
    """
    form = CompletionFormat
    count = len(request.prompt) if isinstance(request, CompletionRequest) else 1
    echo = [""] * count
    if count * request.n > settings.max_sequences:
        most = f"the {settings.max_sequences} answers that a request may have"
        raise ApiError(400, f"{count} prompts with n={request.n} ask for more than {most}", param="n")
    room = max_length(engine, settings)
    try:
        if isinstance(request, ChatRequest):
            text = chat_text(engine.tokenizer, [message.for_template() for message in request.messages])
            prompts, form = [_encode(engine, text, room, special=False)], ChatFormat
        else:
            assert isinstance(request, CompletionRequest)
            prompts = [_encode(engine, prompt, room) for prompt in request.prompt]
            if request.echo:
                decode = functools.partial(engine.tokenizer.decode, skip_special_tokens=True)
                echo = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in request.prompt]
    except UserError as error:  # of the chat template
        raise ApiError(400, str(error), param="messages") from error
    except ValueError as error:
        raise ApiError(400, str(error), param="prompt") from error
    limits = (request.wanted_tokens, room, settings.max_tokens_limit)
    params = [request.sampling(_new_tokens(len(prompt), *limits)) for prompt in prompts]
    repeated = [text for text in echo for _ in range(request.n)]
    with_logprobs = request.wanted_logprobs is not None
    return prompts, params, form(engine.tokenizer, settings.model_name, sum(map(len, prompts)), repeated, with_logprobs)


def max_length(engine: Engine, settings: ServerSettings) -> int | None:
    """Most tokens of prompt and answer; None: any number."""
    made_for = getattr(engine.model.config.get_text_config(), "max_position_embeddings", None)
    limits = (engine.runner.max_length, settings.max_length or made_for)
    return min((limit for limit in limits if limit is not None), default=None)


def _encode(engine: Engine, prompt: str | list[int], most: int | None, special: bool = True) -> list[int]:
    """Token ids; prompts that are too long whatever their tokens are rejected before they are tokenized."""
    least = len(prompt) // _longest_token(engine.tokenizer) if isinstance(prompt, str) else len(prompt)
    if most is not None and least >= most:
        message = f"at least {least} prompt tokens leave no room within the {most} of a request; shorten the prompt"
        raise ApiError(400, message, param="prompt", code="context_length_exceeded")
    return engine.encode(prompt, special)


@functools.lru_cache(maxsize=1)
def _longest_token(tokenizer: Any) -> int:
    """Most characters that a token stands for."""
    return max(map(len, tokenizer.get_vocab()))


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
