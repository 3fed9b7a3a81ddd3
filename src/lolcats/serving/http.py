"""HTTP plumbing: connections and bodies within limits, server-sent events, clients that disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from lolcats.serving.protocol import CLIENT_GONE, ApiError

Answer = TypeVar("Answer")
# How much of a body that is too large is still taken, as a multiple of the limit: closing the connection at once
# would often reach the client before the reason does.
_PATIENCE = 8


class Connection(H11Protocol):
    """A connection that does not stay open for nothing; uvicorn's own limits begin after the first request."""

    most: ClassVar[int]  # one more closes the oldest of those that are idle
    idle_s: ClassVar[float]  # without the whole head of a request, or with an answer that nobody takes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._opened, self._seen = self.loop.time(), (self.cycle, 0)
        self._timer = self.loop.call_later(self.idle_s, self._watch)
        open_ = [item for item in self.connections if isinstance(item, Connection) and not item.transport.is_closing()]
        idle = [item for item in open_ if item.idle and item is not self]
        if len(open_) > self.most and idle:
            min(idle, key=lambda item: item._opened).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """Close the connection if nothing has happened since the last look."""
        unsent = self.transport.get_write_buffer_size()
        if (self.idle or unsent) and self._seen == (self.cycle, unsent):
            self.transport.abort()
        else:
            self._seen = self.cycle, unsent
            self._timer = self.loop.call_later(self.idle_s, self._watch)


async def read_body(request: Request, most_bytes: int, timeout_s: float) -> bytes:
    """The body.

    Raises:
        ApiError: 415 no JSON by its header, 413 too large, 408 too slow, 499 the client went away.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # Web pages may send other types across sites without asking; also a frequent slip with curl.
        raise ApiError(415, f"expected the header Content-Type: application/json, got {content_type!r}")

    async def read() -> bytes:
        body, size = bytearray(), 0
        async for part in request.stream():
            size += len(part)
            if size <= most_bytes:
                body += part
            elif size > _PATIENCE * most_bytes:
                break
        if size > most_bytes:
            message = f"the body is larger than the {most_bytes} bytes that this server takes"
            raise ApiError(413, message, code="body_too_large", headers={"connection": "close"})
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), timeout_s)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not come within {timeout_s:g} s", headers={"connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(CLIENT_GONE, "the client went away") from None


class EventStream(StreamingResponse):
    """JSON objects as server-sent events (WHATWG HTML), "[DONE]" after the last.

    A failure becomes an event, as the status is sent already.

    Args:
        close: called at the end in any case, also if the client disconnects before the first event.
    """

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], close: Callable[[], None]) -> None:
        # Proxies must pass events on as they come.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._events(chunks), media_type="text/event-stream", headers=headers)
        self._close = close
        self._status = CLIENT_GONE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
            scope["state"]["status"] = self._status

    async def _events(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                yield _event(chunk)
            self._status = 200
            yield "data: [DONE]\n\n"
        except ApiError as error:
            self._status = error.status
            yield _event(error.body)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def unless_disconnected(http: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        ApiError: 499, the client went away.
    """

    async def disconnected() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(CLIENT_GONE, "the client went away")
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
