"""Reading a request's body within limits of size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from lolcats.serving.errors import CLIENT_GONE, ApiError

# How much of a body that is too large is still taken, as a multiple of the limit: closing the connection at once
# would often reach the client before the reason does.
_PATIENCE = 8


async def read_body(request: Request, most_bytes: int, timeout_s: float) -> bytes:
    """The body.

    Raises:
        ApiError: 415 no JSON by its header, 413 too large, 408 too slow, 499 the client went away.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # Web pages may send other types across sites without asking; also a frequent slip with curl.
        raise ApiError(415, f"expected the header Content-Type: application/json, got {content_type!r}")
    try:
        return await asyncio.wait_for(_read(request, most_bytes), timeout_s)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not come within {timeout_s:g} s", headers={"connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(CLIENT_GONE, "the client went away") from None


async def _read(request: Request, most_bytes: int) -> bytes:
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > _PATIENCE * most_bytes:
            break
        if size <= most_bytes:
            pieces.append(piece)
        else:
            pieces.clear()
    if size > most_bytes:
        message = f"the body is larger than the {most_bytes} bytes that this server takes"
        raise ApiError(413, message, code="body_too_large", headers={"connection": "close"})
    return b"".join(pieces)
