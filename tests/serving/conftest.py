"""Real servers on free local ports, over a tiny random model."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from generation_kit import kit_fixture, model_fixture, tokenizer_fixture  # noqa: F401

from lolcats.generation.engine import Engine
from lolcats.serving.server import Server, listen
from lolcats.serving.settings import ServerSettings


@dataclass
class Running:
    """A server in a thread."""

    server: Server
    engine: Engine
    port: int
    thread: threading.Thread

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=60)

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

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds; fails after a minute."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def wait_until_idle(self) -> None:
        slots = self.engine.runner.cache.max_slots
        self.wait_for(lambda: not self.engine.busy and self.engine.counts["free_slots"] == slots)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture(scope="session")
def serve(model: Any, tokenizer: Any) -> Any:
    """`with serve(max_slots=1, api_key="x") as running`: settings of the server."""

    @contextmanager
    def start(model: Any = model, tokenizer: Any = tokenizer, **options: Any) -> Iterator[Running]:
        settings = ServerSettings(**({"model_name": "tiny", "max_length": 1000, "max_slots": 4} | options))
        engine = Engine(model, tokenizer, max_slots=settings.max_slots)
        server, socket = Server(engine, settings), listen("127.0.0.1", 0)
        thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
        thread.start()
        found = Running(server, engine, socket.getsockname()[1], thread)
        found.wait_for(lambda: server.started)
        try:
            yield found
        finally:
            found.stop()

    return start


@pytest.fixture(scope="session")
def server(serve: Any) -> Iterator[Running]:
    """One server for all tests that leave it as it was."""
    with serve() as found:
        yield found


@pytest.fixture(scope="session")
def client(server: Running) -> openai.OpenAI:
    return server.client()
