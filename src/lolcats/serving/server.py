"""Running the application: a socket, signals, and an end that waits for running requests."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from types import FrameType

import uvicorn

from lolcats.errors import UserError
from lolcats.generation.engine import Engine
from lolcats.serving.app import create_app
from lolcats.serving.service import Service
from lolcats.serving.settings import ServerSettings

# After the last answer, connections that are still open get this long.
_GRACE_S = 5


class Server(uvicorn.Server):
    """Ends gently at the first signal: new requests get 503, running ones finish; at once at the second."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.service = Service(engine, settings)
        app = create_app(self.service)
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_GRACE_S))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """For SIGTERM and SIGINT; safe from any thread."""
        if self._loop is None or self.service.draining:
            self.should_exit = self.force_exit = True
            return
        self.service.draining = True
        self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

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


def is_local(host: str) -> bool:
    """Whether only programs on this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
