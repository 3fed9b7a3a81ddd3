"""The contents of /metrics, for Prometheus."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lolcats.generation.engine import Engine

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """What one server measures, and the counts of its engine, read when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        here: dict[str, Any] = {"registry": self.registry}
        seconds = here | {"buckets": _SECONDS}
        self.requests = Counter("lolcats_requests", "HTTP requests that ended.", ["path", "status"], **here)
        whole, first = "From a request's arrival to the end of its answer.", "The same to a stream's first text."
        self.seconds = Histogram("lolcats_request_seconds", whole, ["path"], **seconds)
        self.first_token_seconds = Histogram("lolcats_time_to_first_token_seconds", first, **seconds)
        for name, text in (
            ("waiting", "Sequences that wait for a slot."),
            ("prefilling", "Sequences whose prompt is being read."),
            ("running", "Sequences that generate."),
            ("free_slots", "Slots without a sequence."),
            ("tokens_prefilled", "Prompt tokens that went through the model."),
            ("tokens_decoded", "Generated tokens that went through the model."),
        ):
            Gauge(f"lolcats_{name}", text, **here).set_function(partial(lambda name: engine.counts[name], name))


class Measure:
    """ASGI middleware: counts and times every HTTP request."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.monotonic(), 500

        async def watch(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            path = getattr(scope.get("route"), "path", "other")  # not the client's text: labels must stay few
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.monotonic() - start)
