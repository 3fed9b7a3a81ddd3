"""Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from lolcats.serving.errors import CLIENT_GONE, ApiError


class EventStream(StreamingResponse):
    """JSON objects as events, "[DONE]" after the last. A failure becomes an event, for the status is sent already.

    Args:
        close: called at the end in any case, also if the client is gone before the first event.
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
