"""OpenAI's protocol as this server accepts it: requests, checked, and errors.

https://platform.openai.com/docs/api-reference (completions, chat). Beyond it, `top_k`, `min_p`, `repetition_penalty`,
`stop_token_ids` and `ignore_eos` as vLLM has them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lolcats.generation.sampling import MAX_LOGPROBS, CommonParams, SamplingParams, explain

# Status -> `type` in the body; other 4xx are the request's fault.
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
CLIENT_GONE = 499  # nginx's number for "the client closed the connection"
# About the caller or the account; accepted without effect.
IGNORED = frozenset({"user", "metadata", "service_tier", "store", "safety_identifier", "prompt_cache_key"})
# Parameters that this server does not have, each with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
Parsed = TypeVar("Parsed", bound="OpenAIRequest")


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


class _Strict(BaseModel):
    """No guessing: "3" is not a number, and unknown names are mistakes."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_Strict):
    include_usage: bool = False


class OpenAIRequest(CommonParams):
    """Parameters of both kinds of requests."""

    default_max_tokens: ClassVar[int | None]

    model: str | None = None
    n: int = Field(1, ge=1)
    max_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(0, ge=-1, description="0 and -1: all tokens.")

    @property
    def wanted_tokens(self) -> int | None:
        """New tokens that the request names, or its kind's default; None: as many as there is room for."""
        return self.default_max_tokens if self.max_tokens is None else self.max_tokens

    @property
    @abstractmethod
    def wanted_logprobs(self) -> int | None:
        """As `SamplingParams.logprobs`."""

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """As the engine takes them."""
        values = self.model_dump(include=set(CommonParams.model_fields)) | {"top_k": max(self.top_k, 0)}
        return SamplingParams(max_new_tokens=max_new_tokens, logprobs=self.wanted_logprobs, **values)


def _prompts(value: Any) -> Any:
    """Each prompt, as text or token ids."""
    prompts = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    for item in prompts:
        if not isinstance(item, str) and not (isinstance(item, list) and item and all(type(x) is int for x in item)):
            raise ValueError("expected text, a list of texts, token ids or lists of these")
    return prompts


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions."""

    default_max_tokens = 16

    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates expect it: one text, and "system" for OpenAI's newer "developer"."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions."""

    default_max_tokens = None

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return super().wanted_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def parse(kind: type[Parsed], body: bytes) -> Parsed:
    """A request from JSON.

    Raises:
        ApiError: 400: not JSON, a wrong value, an unknown or unsupported parameter.
    """
    try:
        values = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(values, dict):
        raise ApiError(400, f"expected a JSON object, got {type(values).__name__}", code="invalid_json")
    kept = {}
    for name, value in values.items():
        if value is None or name in IGNORED:
            continue
        if name not in UNSUPPORTED:
            kept[name] = value
        elif value not in UNSUPPORTED[name]:
            raise ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")
    try:
        request = kind.model_validate(kept)
    except ValidationError as error:
        name, message = explain(error)
        raise ApiError(400, message, param=name) from error
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not supported by this server", param="echo")
    return request
