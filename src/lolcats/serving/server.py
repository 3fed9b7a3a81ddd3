"""The HTTP server: routes, admission, and from a request to its response over one engine."""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from lolcats.errors import UserError
from lolcats.generation.engine import Engine
from lolcats.generation.request import Piece, Result, chat_text
from lolcats.generation.request import Request as EngineRequest
from lolcats.generation.runner import DEFAULT_MAX_LENGTH
from lolcats.generation.sampling import SamplingParams
from lolcats.serving.answers import ChatFormat, CompletionFormat
from lolcats.serving.protocol import ChatRequest, CompletionRequest, OpenAIRequest, api_error
from lolcats.serving.settings import ServerSettings

MAX_BODY_BYTES = 4 * 2**20
MAX_CONNECTIONS = 1024  # more get 503


class Server(uvicorn.Server):
    """At the first signal it closes its socket, lets running requests finish, and cancels them after `drain_timeout`; a
    second Ctrl-C ends it at once.
    """

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        limits: dict[str, Any] = {"limit_concurrency": MAX_CONNECTIONS, "ws": "none"}
        limits["timeout_graceful_shutdown"] = settings.drain_timeout + 10  # of clients that do not read their answer
        super().__init__(uvicorn.Config(create_app(engine, settings), log_level="warning", **limits))
        self._engine, self._drain_s = engine, settings.drain_timeout

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop, cancel = asyncio.get_running_loop(), functools.partial(self._engine.shutdown, drain=False)
        timer = loop.call_later(self._drain_s, loop.run_in_executor, None, cancel)
        await super().shutdown(sockets)
        timer.cancel()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another") from error


def create_app(engine: Engine, settings: ServerSettings) -> FastAPI:
    """The application; its engine runs while the application does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.shutdown, drain=False)

    # No pages of documentation: they would load scripts from elsewhere.
    pages: dict[str, Any] = {"docs_url": None, "redoc_url": None}
    app = FastAPI(title="lolcats", lifespan=lifespan, max_body_size=MAX_BODY_BYTES, **pages)
    service = Service(engine, settings)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    if settings.cors:
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors, allow_methods=["*"], allow_headers=["*"])

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    async def check_key(request: Request) -> None:
        if settings.api_key is not None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            # Headers are read as Latin-1, keys written as UTF-8.
            right = hmac.compare_digest(given.encode("latin-1"), settings.api_key.encode())
            if scheme.lower() != "bearer" or not right:
                raise api_error(401, "wrong or missing API key; expected Authorization: Bearer KEY", code="invalid_key")

    v1 = APIRouter(prefix="/v1", dependencies=[Depends(check_key)])
    card = {"id": settings.model_name, "object": "model", "created": 0, "owned_by": "lolcats"}
    card["max_model_len"] = service.max_length

    @v1.get("/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    @v1.get("/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(card)

    @v1.post("/completions")
    async def completions(http: Request, request: CompletionRequest) -> Response:
        return await service.answer(http, request)

    @v1.post("/chat/completions")
    async def chat(http: Request, request: ChatRequest) -> Response:
        return await service.answer(http, request)

    app.include_router(v1)
    return app


async def _http_error(request: Request, error: Any) -> Response:
    """`api_error`, and Starlette's own: no such path (404), wrong method (405)."""
    if not isinstance(error.detail, dict):
        message = f"{request.method} {request.url.path}: {error.detail}"
        error = api_error(error.status_code, message, headers=error.headers)
    return JSONResponse(error.detail, error.status_code, headers=error.headers)


async def _invalid(request: Request, error: Any) -> Response:
    """A body that is not JSON, or has a wrong value."""
    first = error.errors()[0]
    name, message = ".".join(map(str, first["loc"][1:])), first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        name, message = "", f"the body is not valid JSON: {first['ctx']['error']}"
    elif first["type"] == "missing":
        message = "missing parameter"
    return await _http_error(request, api_error(400, f"{name}: {message}" if name else message, param=name or None))


class Service:
    """Answers requests over one engine.

    Attributes:
        max_length: most tokens of prompt and answer.
    """

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine, self.settings = engine, settings
        made_for = getattr(engine.model.config.get_text_config(), "max_position_embeddings", None)
        limits = (engine.runner.max_length, settings.max_length or made_for or DEFAULT_MAX_LENGTH)
        self.max_length = min(limit for limit in limits if limit is not None)
        self._longest_token = max(map(len, engine.tokenizer.get_vocab()))

    def check_model(self, name: str | None) -> None:
        """Raise HTTPException 404 unless `name` is the model that is served; None is."""
        if name not in (None, self.settings.model_name):
            message = f"no model {name!r}; this server has {self.settings.model_name!r}"
            raise api_error(404, message, param="model", code="model_not_found")

    async def answer(self, http: Request, request: OpenAIRequest) -> Response:
        """The answer to one request.

        Raises:
            HTTPException: 400 what cannot be served, 404 another model, 429 too many sequences wait, 500, 503.
        """
        self.check_model(request.model)
        waiting, more = self.engine.counts["waiting"], request.n
        more *= len(request.prompt) if isinstance(request, CompletionRequest) else 1
        if waiting + more > self.settings.max_queue:
            message = f"{waiting} sequences wait already, and {more} more are too many; try again later"
            raise api_error(429, message, code="queue_full", headers={"retry-after": "1"})
        prompts = await asyncio.to_thread(self._encode, request)  # long ones take a while
        room = [self._new_tokens(len(prompt), request.max_tokens) for prompt in prompts]
        each = [
            (prompt, request.sampling(new, choice))
            for prompt, new in zip(prompts, room, strict=True)
            for choice in range(request.n)
        ]
        kind = ChatFormat if isinstance(request, ChatRequest) else CompletionFormat
        tokens, with_logprobs = sum(map(len, prompts)), request.wanted_logprobs is not None
        form = kind(self.engine.tokenizer, self.settings.model_name, tokens, with_logprobs)
        choices = Choices(self.engine, each, request.stream)
        if request.stream:
            usage = request.stream_options is not None and request.stream_options.include_usage
            return EventStream(self._lines(choices, form, usage), choices.cancel)
        watching = asyncio.create_task(choices.cancel_with(http))
        try:
            results = {index: event async for index, event in choices.events() if isinstance(event, Result)}
        finally:
            watching.cancel()
            choices.cancel()
        return JSONResponse(form.whole([results[index] for index in sorted(results)]))

    async def _lines(self, choices: Choices, form: CompletionFormat, usage: bool) -> AsyncIterator[str]:
        """Server-sent events (WHATWG HTML), "[DONE]" after the last; a failure becomes an event."""

        def line(value: Any) -> str:
            return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"

        try:
            for chunk in form.first(len(choices.requests)):
                yield line(chunk)
            async for index, event in choices.events():
                yield line(form.last(index, event) if isinstance(event, Result) else form.piece(index, event))
            if usage:
                yield line(form.usage_chunk())
            yield "data: [DONE]\n\n"
        except HTTPException as error:  # the status is sent already
            yield line(error.detail)

    def _encode(self, request: OpenAIRequest) -> list[list[int]]:
        """The tokens of each prompt."""
        wanted = request.max_tokens
        try:
            if isinstance(request, ChatRequest):
                text = chat_text(self.engine.tokenizer, [message.for_template() for message in request.messages])
                self._new_tokens(len(text) // self._longest_token, wanted)  # before tokenizing what would take long
                return [self.engine.encode(text, special=False)]
            assert isinstance(request, CompletionRequest)
            for prompt in request.prompt:  # reject before tokenizing what would take long
                self._new_tokens(len(prompt) // (self._longest_token if isinstance(prompt, str) else 1), wanted)
            return [self.engine.encode(prompt) for prompt in request.prompt]
        except UserError as error:  # of the chat template
            raise api_error(400, str(error), param="messages") from error
        except ValueError as error:
            raise api_error(400, str(error), param="prompt") from error

    def _new_tokens(self, prompt_tokens: int, wanted: int | None) -> int:
        """Most new tokens of a sequence."""
        room = self.max_length - prompt_tokens
        if room < (wanted or 1):
            message = (
                f"{prompt_tokens} or more prompt tokens and {wanted or 1} new ones are more than the {self.max_length}"
                " that a request may have; shorten the prompt or lower max_tokens"
            )
            raise api_error(400, message, param="prompt", code="context_length_exceeded")
        return wanted or room


class Choices:
    """The choices of one HTTP request, which end together when one fails.

    Raises:
        HTTPException: 400 what the engine refuses, 503 it is shut down.
    """

    def __init__(self, engine: Engine, each: list[tuple[list[int], SamplingParams]], stream: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self.requests: list[EngineRequest] = []
        try:
            for index, (prompt, params) in enumerate(each):
                on_event = functools.partial(self._put, index)
                self.requests.append(engine.submit(prompt, params, stream=stream, on_event=on_event))
        except ValueError as error:
            self.cancel()
            raise api_error(400, str(error)) from error
        except RuntimeError as error:
            raise api_error(503, str(error), code="shutting_down") from error

    def cancel(self) -> None:
        """End what is unfinished; its slots are free after the engine's next step."""
        for request in self.requests:
            if not request.done:
                request.cancel()

    async def cancel_with(self, http: Request) -> None:
        """Wait until the client goes away, then cancel."""
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self.cancel()

    async def events(self) -> AsyncIterator[tuple[int, Piece]]:
        """(choice, event); each choice's pieces, then its result.

        Raises:
            HTTPException: 500 the model failed, 503 cancelled by the server.
        """
        unfinished = len(self.requests)
        while unfinished:
            index, event = await self._events.get()
            if isinstance(event, Result):
                unfinished -= 1
                if event.finish_reason == "error":
                    raise api_error(500, f"the model failed: {event.error}", code="model_error")
                if event.finish_reason == "cancelled":
                    raise api_error(503, "cancelled: the server is shutting down", code="cancelled")
            yield index, event

    def _put(self, index: int, event: Piece) -> None:
        """The engine's callback, in its thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))


class EventStream(StreamingResponse):
    """A response that calls `close` at its end, also if the client disconnects before the first event."""

    def __init__(self, lines: AsyncIterator[str], close: Callable[[], None]) -> None:
        # Proxies must pass events on as they come.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(lines, media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
