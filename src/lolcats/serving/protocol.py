"""OpenAI's protocol as this server accepts it: requests, checked, and errors.

https://platform.openai.com/docs/api-reference (completions, chat). Beyond it, `top_k`, `min_p`, `stop_token_ids` and
`ignore_eos` as vLLM has them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from starlette.exceptions import HTTPException

from lolcats.generation.sampling import MAX_LOGPROBS, CommonParams, SamplingParams, Temperature

# Status -> `type` in the body; other 4xx are the request's fault.
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
# About the caller, the account or how to compute; accepted without effect, as the form of the answer stays the same.
IGNORED = frozenset(
    {"user", "metadata", "service_tier", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"reasoning_effort", "verbosity", "prediction", "parallel_tool_calls"}
)
# Values of parameters that this server does not have, which ask for nothing.
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


def api_error(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> HTTPException:
    """A request that fails, with the body that OpenAI's clients expect.

    Args:
        message: for people: what was expected, what came.
        param: the field of the request that is wrong.
        code: for programs, such as "model_not_found".
        headers: to send with the body.
    """
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    # Message and field may repeat what the client sent, however long.
    body = {"message": message[:1000], "type": kind, "param": param and param[:100], "code": code}
    return HTTPException(status, {"error": body}, headers)  # type: ignore[arg-type]  # any JSON


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)  # others, such as include_obfuscation, have no effect
    include_usage: bool = False


class OpenAIRequest(CommonParams):
    """Parameters of both kinds of requests."""

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="also max_completion_tokens")
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Temperature = 1.0
    top_k: int = Field(0, ge=-1, le=2**31 - 1, description="0 and -1: all tokens.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        """The parameters that have an effect."""
        if not isinstance(values, dict):
            raise api_error(400, "expected a JSON object, and the header Content-Type: application/json")
        kept = {}
        for given, value in values.items():
            name = "max_tokens" if given == "max_completion_tokens" else given
            if value is None or name in IGNORED or (name in DEFAULTS and value in DEFAULTS[name]):
                continue
            if name not in cls.model_fields:
                message = f"parameter {name[:100]!r} is not supported by this server"
                if name in DEFAULTS:
                    message += "; vLLM's may have it (vllm serve)"
                raise api_error(400, message, param=name, code="unsupported_parameter")
            kept[name] = value
        return kept

    @model_validator(mode="after")
    def _goes_together(self) -> OpenAIRequest:
        for name, needed in (("stream_options", "stream"), ("top_logprobs", "logprobs")):
            if getattr(self, name, None) and not getattr(self, needed):
                raise ValueError(f"{name} needs {needed}=true")
        return self

    @property
    def wanted_logprobs(self) -> int | None:
        """As `SamplingParams.logprobs`."""
        raise NotImplementedError

    def sampling(self, max_new_tokens: int, choice: int) -> SamplingParams:
        """Of the k-th answer to a prompt, as the engine takes them. It uses `seed` + k, as answers are to differ."""
        values = self.model_dump(include=set(CommonParams.model_fields)) | {"top_k": max(self.top_k, 0)}
        values["seed"] = None if self.seed is None else self.seed + choice
        return SamplingParams(max_new_tokens=max_new_tokens, logprobs=self.wanted_logprobs, **values)


def _prompts(value: Any) -> Any:
    """Each prompt, as text or token ids."""
    prompts = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    if len(prompts) > 2048:  # as of messages
        raise ValueError(f"expected up to 2048 prompts, got {len(prompts)}")
    for item in prompts:
        if not isinstance(item, str) and not (isinstance(item, list) and item and all(type(x) is int for x in item)):
            raise ValueError("expected text, a list of texts, token ids or lists of these")
    return prompts


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions."""

    max_tokens: int | None = Field(16, ge=1, le=2**31 - 1)
    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs


def _joined(content: Any) -> Any:
    """Parts of text as one text."""
    if not isinstance(content, list):
        return content
    texts: list[Any] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        texts.append(part.get("text") if kind == "text" else None)
        if not isinstance(texts[-1], str):
            raise ValueError(
                f"expected text or parts of the type 'text', got the type {str(kind)[:30]!r}: images and audio are not"
                " supported by this server, which has the language model alone"
            )
    return "".join(texts)


class Message(BaseModel):
    """Clients send back the messages that they got, whatever else is in these."""

    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str | None, BeforeValidator(_joined, json_schema_input_type=str | list[dict[str, Any]] | None)
    ] = None
    reasoning_content: str | None = None
    tool_calls: Any = None

    @model_validator(mode="after")
    def _text(self) -> Message:
        if self.tool_calls:
            raise ValueError("tool_calls is not supported by this server; vLLM's has it (vllm serve)")
        if self.content is None and self.role != "assistant":
            raise ValueError(f"missing content of a message of the role {self.role!r}")
        return self

    def for_template(self) -> dict[str, str]:
        """As chat templates expect it: one text, and "system" for OpenAI's newer "developer"."""
        values = {"role": "system" if self.role == "developer" else self.role, "content": self.content or ""}
        return values | ({"reasoning_content": self.reasoning_content} if self.reasoning_content else {})


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=2048)  # each may be a mistake to list
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    @property
    def wanted_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None
