"""Limits of the built-in server; `lolcats serve` has an option for the first ones."""

from __future__ import annotations

from pydantic import Field

from lolcats.config import Section


class ServerSettings(Section, frozen=True):
    """A server's name, its key and its limits."""

    model_name: str
    """The model's name in requests and answers."""
    api_key: str | None = None
    """What requests under /v1 must bring as a bearer token; null: nothing."""
    cors: list[str] = []
    """Web pages from there may call the server; repeat it, or `*` for any."""
    max_slots: int = Field(32, ge=1)
    """Sequences generated at a time."""
    max_queue: int = Field(256, ge=1)
    """Sequences that may wait; more get status 429."""
    max_length: int | None = Field(None, ge=2)
    """Most tokens of prompt and answer; without, what the engine or the model's configuration says."""
    max_tokens_limit: int = Field(4096, ge=1)
    """Most new tokens of a request."""
    request_timeout: float = Field(600.0, gt=0)
    """Seconds for a request, waiting included."""
    drain_timeout: float = Field(30.0, ge=0)
    """Seconds that running requests get after SIGTERM."""
    max_sequences: int = 64
    """Most answers of one request, over all its prompts."""
    max_connections: int = 512
    """Requests that are answered at a time; also connections, of which idle ones make room."""
    max_body_bytes: int = 4 * 2**20
    """Size of a request's body."""
    body_timeout_s: float = 30.0
    """Seconds in which a request's body must have come."""
    idle_timeout_s: float = 30.0
    """Seconds after which a connection is closed that brings no request or takes no answer."""
