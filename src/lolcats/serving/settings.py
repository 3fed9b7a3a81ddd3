"""What a server allows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """Limits of a server.

    Attributes:
        model_name: the model's name in requests and answers.
        api_key: what requests under /v1 must bring as a bearer token; None: nothing.
        max_tokens_limit: most new tokens that a request may ask for.
        max_length: most tokens of prompt and answer; None: what the engine or the model's configuration says.
        max_sequences: most answers of one request, over all its prompts.
        max_body_bytes: size of a request's body.
        body_timeout_s: seconds in which a request's body must have come.
        request_timeout_s: seconds that the answer to a request may take, waiting for a slot included.
        drain_timeout_s: seconds that running requests get when the server is told to stop.
    """

    model_name: str
    api_key: str | None = None
    max_tokens_limit: int = 4096
    max_length: int | None = None
    max_sequences: int = 64
    max_body_bytes: int = 4 * 2**20
    body_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
