"""Files of prompts in, files of answers out, so that an interrupted run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from lolcats.errors import UserError
from lolcats.generation.params import SamplingParams
from lolcats.generation.request import Result

_FINISHED = ("stop", "length")


@dataclass(frozen=True)
class Prompt:
    """One line of a file of prompts.

    Attributes:
        number: place among all prompts, from 0.
        id: names the answer; the number unless the file gives one.
        text: the prompt; for the chat template if there are messages.
        messages: a conversation to continue, instead of text.
        params: entries of `SamplingParams` that differ from the command's.
    """

    number: int
    id: str | int
    text: str
    messages: list[dict[str, str]] | None
    params: dict[str, Any]


def read_prompts(file: Path, first: int = 0) -> list[Prompt]:
    """Prompts from a text file, one a line, or from JSON lines (`.jsonl`): {"prompt": ..., "id": ..., ...}.

    Args:
        first: number of the first prompt.

    Raises:
        UserError: the file cannot be read, or a line is not a prompt; with the line's number.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --prompts-file {file}: {error}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        if not line.strip():
            continue
        index = first + len(prompts)
        if file.suffix == ".jsonl":
            prompts.append(_from_json(line, index, f"{file}, line {number}"))
        else:
            prompts.append(Prompt(index, index, line, None, {}))
    refuse_equal_ids(prompts)
    return prompts


def refuse_equal_ids(prompts: Iterable[Prompt]) -> None:
    """Raise UserError if two prompts have the same id: answers are told apart by it."""
    seen: set[str | int] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UserError(f"two prompts have the id {prompt.id!r}; give each its own")
        seen.add(prompt.id)


def _from_json(line: str, index: int, place: str) -> Prompt:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not JSON ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f'{place}: expected an object such as {{"prompt": "..."}}, got {line[:60]}')
    text, messages = values.pop("prompt", None), values.pop("messages", None)
    identity = values.pop("id", index)
    if isinstance(text, str) == isinstance(messages, list):
        raise UserError(f'{place}: expected either "prompt" (text) or "messages" (a list)')
    if not isinstance(identity, str | int):
        raise UserError(f"{place}: id {identity!r} is neither text nor an integer")
    try:
        SamplingParams.from_dict(values)
    except ValueError as error:
        raise UserError(f"{place}: {error}") from error
    if messages is not None:
        text = next((item.get("content", "") for item in reversed(messages) if isinstance(item, dict)), "")
    return Prompt(index, identity, text, messages, values)


def chat_text(tokenizer: Any, prompt: str | list[dict[str, str]]) -> str:
    """A user's message, or a conversation, in the tokenizer's chat template.

    Raises:
        UserError: there is no template, or it does not take this conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("this model's tokenizer has no chat template; leave out --chat")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what they like
        raise UserError(f"the chat template does not take this conversation: {error}") from error


def merged(params: SamplingParams, changes: dict[str, Any]) -> SamplingParams:
    """`params` with some entries changed.

    Raises:
        ValueError: a bad value.
    """
    return SamplingParams.from_dict({item.name: getattr(params, item.name) for item in fields(params)} | changes)


def record(prompt: Prompt, result: Result) -> dict[str, Any]:
    """What is written about one answer."""
    names = ("text", "finish_reason", "stop", "prompt_tokens", "logprobs", "top_logprobs", "error")
    values = {name: getattr(result, name) for name in names}
    kept = {name: value for name, value in values.items() if value is not None}
    return {"id": prompt.id, "prompt": prompt.messages or prompt.text} | kept | {"new_tokens": len(result.token_ids)}


class AnswerFile:
    """JSON lines, each written out when its answer is there.

    Args:
        resume: go on with a file that exists: its finished answers count, a torn last line is cut off.

    Attributes:
        finished: ids that need no answer any more.

    Raises:
        UserError: the file exists without `resume`, cannot be written, or holds something else.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.path = path
        self.finished: set[str | int] = set()
        if path.exists() and not resume:
            raise UserError(f"{path} exists; go on with --resume, or choose another --output")
        try:
            keep = self._read_finished() if path.exists() else 0
            self._stream = path.open("r+b" if path.exists() else "xb")
            self._stream.truncate(keep)
            self._stream.seek(keep)
        except OSError as error:
            raise UserError(f"cannot write --output {path}: {error}") from error

    def _read_finished(self) -> int:
        """Length of the part that holds whole lines, in bytes."""
        keep = 0
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break  # the last line, torn when the run was killed
            try:
                values = json.loads(line)
                identity, _ = values["id"], values["prompt"]
                if values.get("finish_reason", "stop") in _FINISHED:
                    self.finished.add(identity)
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{self.path}, line {number}: not an answer of `lolcats generate`; choose another --output"
                ) from error
            keep += len(line)
        return keep

    def write(self, values: dict[str, Any]) -> None:
        self._stream.write((json.dumps(values, ensure_ascii=False) + "\n").encode())
        self._stream.flush()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
