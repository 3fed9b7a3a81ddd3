"""Real servers on free local ports, over a tiny random model."""

from __future__ import annotations

import http.client
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import SO_SNDBUF, SOL_SOCKET
from typing import Any

import openai
import pytest

from lolcats.generation.engine import Engine
from lolcats.serving.server import Server, listen
from lolcats.serving.settings import ServerSettings

# Helper modules of this folder and its neighbour.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "generation")]

from generation_kit import kit_fixture, model_fixture, tokenizer_fixture  # noqa: E402, F401

MODEL = "tiny"


@dataclass
class Running:
    """A server in a thread."""

    server: Server
    port: int
    thread: threading.Thread

    @property
    def engine(self) -> Engine:
        return self.server.service.engine

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0, timeout=60)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, JSON or text, headers); bytes are sent as they are."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection = self.connect()
        connection.request(method, path, body, {"content-type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        text = answer.read().decode()
        found = {name.lower(): value for name, value in answer.getheaders()}
        connection.close()
        return answer.status, json.loads(text) if "json" in found.get("content-type", "") else text, found

    def metric(self, name: str) -> float:
        """A sample of /metrics by its name and labels; 0 if it is not there."""
        lines = self.request("GET", "/metrics")[1].splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name), 0.0)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds; fails after a minute."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def wait_until_idle(self) -> None:
        """Until every slot is free and every request forgotten."""
        slots = len(self.engine.runner.lengths)
        self.wait_for(lambda: not self.engine.busy and self.engine.counts["free_slots"] == slots)
        self.wait_for(lambda: not self.server.service._open)

    def stop(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextmanager
def running(engine: Engine, send_buffer: int | None = None, **settings: Any) -> Iterator[Running]:
    server = Server(engine, ServerSettings(model_name=MODEL, **settings))
    socket = listen("127.0.0.1", 0)
    if send_buffer is not None:
        socket.setsockopt(SOL_SOCKET, SO_SNDBUF, send_buffer)  # accepted ones inherit it
    thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
    thread.start()
    found = Running(server, socket.getsockname()[1], thread)
    found.wait_for(lambda: server.started)
    try:
        yield found
    finally:
        if thread.is_alive():
            found.stop()


@pytest.fixture(scope="session")
def serve(model: Any, tokenizer: Any) -> Any:
    """`with serve(max_slots=1, api_key="x") as running`: options of the engine and of the server."""

    def start(**options: Any) -> Any:
        engine_options = {name: options.pop(name) for name in ("max_slots", "max_queue") if name in options}
        engine = Engine(options.pop("model", model), options.pop("tokenizer", tokenizer), **engine_options)
        return running(engine, **({"max_length": 1000, "request_timeout": 60} | options))

    return start


@pytest.fixture(scope="session")
def server(serve: Any) -> Iterator[Running]:
    """One server for all tests that leave it as it was."""
    with serve(max_slots=4) as found:
        yield found


@pytest.fixture(scope="session")
def make_alone(model: Any, tokenizer: Any) -> Any:
    """(prompt, params) -> the result of the request without any other beside it."""
    engine = Engine(model, tokenizer, max_slots=1)
    return lambda prompt, params: engine.generate([prompt], params)[0]


@pytest.fixture(scope="session")
def client(server: Running) -> openai.OpenAI:
    return server.client()
