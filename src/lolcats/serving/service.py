"""From an HTTP request to its answer: admission, the engine, clients that leave, and the end of the server."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lolcats.generation.engine import Engine
from lolcats.generation.request import Result
from lolcats.serving.answers import Format
from lolcats.serving.body import read_body
from lolcats.serving.errors import CLIENT_GONE, ApiError
from lolcats.serving.metrics import Metrics
from lolcats.serving.prepare import prepare
from lolcats.serving.schema import AnyRequest, parse
from lolcats.serving.sequences import Sequence, Sequences
from lolcats.serving.settings import ServerSettings
from lolcats.serving.streams import EventStream

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
        self._open: set[Sequences] = set()
        self._all_closed = asyncio.Event()

    # --- requests ------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """Refuse who must not ask, and everybody when the server is ending.

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

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 unless `name` is the model that is served; None is."""
        if name not in (None, self.settings.model_name):
            message = f"no model {name!r}; this server has {self.settings.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def answer(self, http: Request, kind: type[AnyRequest]) -> Response:
        """The answer to one request of `kind`.

        Raises:
            ApiError: whatever is wrong with it.
        """
        start = time.monotonic()
        body = await read_body(http, self.settings.max_body_bytes, self.settings.body_timeout_s)
        request = parse(kind, body)
        self.check_model(request.model)
        job = await asyncio.to_thread(prepare, request, self.engine, self.settings)  # long prompts take a while
        sequences = Sequences(self.engine, self.settings.request_timeout_s, self.metrics.count)
        self._open.add(sequences)
        if request.stream:
            try:
                await sequences.start(job.groups, stream=True)
            except BaseException:
                self._close(sequences)
                raise
            usage = request.stream_options is not None and request.stream_options.include_usage
            return EventStream(self._chunks(sequences, job.format, usage, start), lambda: self._close(sequences))
        try:
            results = await _unless_disconnected(http, self._results(sequences, job.groups))
        finally:
            self._close(sequences)
        return JSONResponse(job.format.whole(results))

    async def _results(self, sequences: Sequences, groups: list[list[Sequence]]) -> list[Result]:
        await sequences.start(groups, stream=False)
        results = {index: event async for index, event in sequences.events() if isinstance(event, Result)}
        return [results[index] for index in sorted(results)]

    async def _chunks(
        self, sequences: Sequences, form: Format, usage: bool, start: float
    ) -> AsyncIterator[dict[str, Any]]:
        for chunk in form.first():
            yield chunk
        waiting = True
        async for index, event in sequences.events():
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
            await asyncio.wait_for(self._all_closed.wait(), self.settings.drain_timeout_s)
        except asyncio.TimeoutError:
            self.cancel_all()
            with suppress(asyncio.TimeoutError):  # a client that does not read holds its stream open
                await asyncio.wait_for(self._all_closed.wait(), _CANCEL_S)

    def cancel_all(self) -> None:
        for sequences in self._open:
            sequences.cancel()

    def _close(self, sequences: Sequences) -> None:
        sequences.close()
        self._open.discard(sequences)
        if self.draining and not self._open:
            self._all_closed.set()


async def _unless_disconnected(http: Request, work: Any) -> Any:
    """What the coroutine `work` gives; it is cancelled when the client goes away.

    Raises:
        ApiError: 499, the client went away.
    """

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(work), asyncio.create_task(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ApiError(CLIENT_GONE, "the client went away")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
