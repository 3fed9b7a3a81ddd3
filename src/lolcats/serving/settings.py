"""Limits of the built-in server, which are options of `lolcats serve`."""

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
    drain_timeout: int = Field(30, ge=0)
    """Seconds that running requests get after SIGTERM."""
