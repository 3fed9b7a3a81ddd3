"""The routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from lolcats.serving.errors import ApiError
from lolcats.serving.metrics import Measure
from lolcats.serving.prepare import max_length
from lolcats.serving.schema import AnyRequest, ChatRequest, CompletionRequest
from lolcats.serving.service import Service


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
    app.include_router(_public(service))
    app.include_router(_v1(service))
    return app


def _public(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """200 while requests are taken."""
        return JSONResponse({"status": "draining"}, 503) if service.draining else JSONResponse({"status": "ok"})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return router


def _v1(service: Service) -> APIRouter:
    async def admit(request: Request) -> None:
        service.admit(request)

    router = APIRouter(prefix="/v1", dependencies=[Depends(admit)])
    length = max_length(service.engine, service.settings)
    name = service.settings.model_name
    card = {"id": name, "object": "model", "created": 0, "owned_by": "lolcats", "max_model_len": length}

    @router.get("/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    @router.get("/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(card)

    @router.post("/completions", openapi_extra=_body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await service.answer(request, CompletionRequest)

    @router.post("/chat/completions", openapi_extra=_body_of(ChatRequest))
    async def chat(request: Request) -> Response:
        return await service.answer(request, ChatRequest)

    return router


def _body_of(kind: type[AnyRequest]) -> dict[str, Any]:
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
