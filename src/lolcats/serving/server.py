"""The HTTP server: routes, a socket, signals, and an end that waits for running requests."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from lolcats.errors import UserError
from lolcats.generation.engine import Engine
from lolcats.serving.http import Connection
from lolcats.serving.metrics import Measure
from lolcats.serving.protocol import ApiError, ChatRequest, CompletionRequest, OpenAIRequest
from lolcats.serving.service import Service, max_length
from lolcats.serving.settings import ServerSettings

# After the last answer, connections that are still open get this long.
_GRACE_S = 5


class Server(uvicorn.Server):
    """Ends gently at the first signal: new requests get 503, running ones finish; at once at the second."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        settings = settings.model_copy(update={"max_connections": min(settings.max_connections, _descriptors() // 2)})
        self.service = Service(engine, settings)
        limits = {"most": settings.max_connections, "idle_s": settings.idle_timeout_s}
        options: dict[str, Any] = {"http": type("_Connection", (Connection,), limits), "ws": "none"}
        app = create_app(self.service)
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_GRACE_S, **options))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: Future[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """For SIGTERM and SIGINT; safe from any thread."""
        if self._loop is None or self.service.draining:
            self.should_exit = self.force_exit = True
            return
        self.service.draining = True
        self._draining = asyncio.run_coroutine_threadsafe(self._drain(), self._loop)

    async def _drain(self) -> None:
        try:
            await self.service.drain()
        finally:
            self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one.

    Raises:
        UserError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another") from error


def _descriptors() -> int:
    """Files and connections that the process may have open."""
    try:
        import resource  # not on Windows
    except ImportError:
        return sys.maxsize
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def is_local(host: str) -> bool:
    """Whether only programs on this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def create_app(service: Service) -> FastAPI:
    """The application; its engine runs while the application does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await asyncio.to_thread(service.engine.shutdown, drain=False)

    # No pages of documentation: they would load scripts from elsewhere.
    app = FastAPI(title="lolcats", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _mistake)
    app.add_middleware(Measure, metrics=service.metrics)
    if service.settings.cors:
        app.add_middleware(
            CORSMiddleware, allow_origins=service.settings.cors, allow_methods=["*"], allow_headers=["*"]
        )

    @app.get("/health")
    async def health() -> Response:
        """200 while requests are taken."""
        return JSONResponse({"status": "draining"}, 503) if service.draining else JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def admit(request: Request) -> None:
        service.admit(request)

    v1 = APIRouter(prefix="/v1", dependencies=[Depends(admit)])
    length = max_length(service.engine, service.settings)
    name = service.settings.model_name
    card = {"id": name, "object": "model", "created": 0, "owned_by": "lolcats", "max_model_len": length}

    @v1.get("/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    @v1.get("/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(card)

    @v1.post("/completions", openapi_extra=_body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await service.answer(request, CompletionRequest)

    @v1.post("/chat/completions", openapi_extra=_body_of(ChatRequest))
    async def chat(request: Request) -> Response:
        return await service.answer(request, ChatRequest)

    app.include_router(v1)
    return app


def _body_of(kind: type[OpenAIRequest]) -> dict[str, Any]:
    """For /openapi.json: the routes read their bodies themselves, within limits."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}


async def _api_error(_: Request, error: Any) -> Response:
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _http_error(request: Request, error: Any) -> Response:
    """Starlette's own: no such path (404), wrong method (405)."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    return await _api_error(request, ApiError(error.status_code, message, headers=dict(error.headers or {})))


async def _mistake(request: Request, _: Exception) -> Response:
    """The server logs the traceback."""
    return await _api_error(request, ApiError(500, "the server made a mistake; its log says more"))
