"""The contents of /metrics, for Prometheus."""

from __future__ import annotations

import functools
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lolcats.generation.engine import Engine

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of one server; the engine's own counts are read when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.open_requests = 0  # HTTP requests whose answer has not ended
        here: dict[str, Any] = {"registry": self.registry}
        seconds = here | {"buckets": _SECONDS}
        ended = "HTTP requests that ended; 499: the client went away."
        self.requests = Counter("lolcats_requests", ended, ["path", "status"], **here)
        whole, first = "From a request's arrival to the end of its answer.", "The same to a stream's first text."
        self.seconds = Histogram("lolcats_request_seconds", whole, ["path"], **seconds)
        self.first_token_seconds = Histogram("lolcats_time_to_first_token_seconds", first, **seconds)
        self._prompt_tokens = Counter("lolcats_prompt_tokens", "Prompt tokens of finished sequences.", **here)
        self._new_tokens = Counter("lolcats_generated_tokens", "Tokens generated.", **here)
        for name, text in (
            ("waiting", "Sequences that wait for a slot."),
            ("prefilling", "Sequences whose prompt is being read."),
            ("running", "Sequences that generate."),
            ("free_slots", "Slots without a sequence."),
        ):
            Gauge(f"lolcats_{name}", text, **here).set_function(functools.partial(_count, engine, name))

    def count_tokens(self, prompt: int, generated: int) -> None:
        """Tokens of a sequence that ended; thread-safe."""
        self._prompt_tokens.inc(prompt)
        self._new_tokens.inc(generated)

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _count(engine: Engine, name: str) -> float:
    return engine.counts[name]


class Measure:
    """ASGI middleware: counts and times every HTTP request.

    An inner application sets `scope["state"]["status"]` where the status that it sent is not the whole truth.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.monotonic(), 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope.setdefault("state", {})
        self.metrics.open_requests += 1
        try:
            await self.app(scope, receive, watch)
        finally:
            self.metrics.open_requests -= 1
            path = getattr(scope.get("route"), "path", "other")  # not the client's text: labels must stay few
            self.metrics.requests.labels(path, str(scope["state"].get("status", status))).inc()
            self.metrics.seconds.labels(path).observe(time.monotonic() - start)
