"""Failures as the protocol has them: a status, and a body that says what was wrong."""

from __future__ import annotations

from typing import Any

# Status -> `type` in the body; other 4xx are the request's fault.
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
CLIENT_GONE = 499  # nginx's number for "the client closed the connection"; nobody reads the answer


class ApiError(Exception):
    """A request that fails.

    Args:
        status: HTTP status.
        message: for people: what was expected, what came.
        param: the field of the request that is wrong.
        code: for programs, such as "model_not_found".
        headers: to send beside the body.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
