"""Files of prompts in, files of answers out, so that an interrupted run can be resumed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from lolcats.errors import UserError
from lolcats.generation.engine import Engine
from lolcats.generation.request import Result
from lolcats.generation.sampling import SamplingParams
from lolcats.generation.text import chat_text

_FINISHED = ("stop", "length")


@dataclass(frozen=True)
class PromptLine:
    """One line of a file of prompts.

    Attributes:
        number: place among all prompts, from 0.
        id: names the answer; the number unless the file gives one.
        text: the prompt; for the chat template if there are messages.
        messages: a conversation to continue, instead of text.
        params: entries of `SamplingParams` of this prompt alone.
    """

    number: int
    id: str | int
    text: str
    messages: list[dict[str, str]] | None
    params: dict[str, Any]


def read_prompts(file: Path, first: int = 0) -> list[PromptLine]:
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
    prompts: list[PromptLine] = []
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        if not line.strip():
            continue
        index = first + len(prompts)
        if file.suffix == ".jsonl":
            prompts.append(_from_json(line, index, f"{file}, line {number}"))
        else:
            prompts.append(PromptLine(index, index, line, None, {}))
    refuse_equal_ids(prompts)
    return prompts


def refuse_equal_ids(prompts: Iterable[PromptLine]) -> None:
    """Raise UserError if two prompts have the same id: it identifies their answers."""
    seen: set[str | int] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UserError(f"two prompts have the id {prompt.id!r}; give each its own")
        seen.add(prompt.id)


def _from_json(line: str, index: int, place: str) -> PromptLine:
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
    return PromptLine(index, identity, text, messages, values)


def answer_lines(
    engine: Engine, lines: list[PromptLine], params: SamplingParams, chat: bool
) -> Iterator[tuple[PromptLine, Result]]:
    """Each prompt with its result, in the order in which they finish. A failed one's result has the reason.

    Args:
        params: for all prompts; a line's own entries replace them. Sampled prompts get different seeds, counted up
            from this one's.
        chat: put plain prompts into the chat template. Conversations always are.

    Raises:
        UserError: there is no chat template.
    """
    if any(chat or line.messages is not None for line in lines):
        chat_text(engine.tokenizer, "")  # refuses before any work is done

    def requests() -> Iterator[tuple[int, tuple[Any, SamplingParams]]]:
        for index, line in enumerate(lines):
            numbered = params if params.seed is None else replace(params, seed=params.seed + line.number)
            yield index, (line_tokens(engine.tokenizer, line, chat), merged(numbered, line.params))

    for index, result in engine.as_completed(requests()):
        yield lines[index], result


def line_tokens(tokenizer: Any, line: PromptLine, chat: bool) -> list[int]:
    """Token ids of a prompt; a chat template writes the special tokens itself."""
    if chat or line.messages is not None:
        text = chat_text(tokenizer, line.text if line.messages is None else line.messages)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(line.text)["input_ids"])


def merged(params: SamplingParams, changes: dict[str, Any]) -> SamplingParams:
    """`params` with some entries changed.

    Raises:
        ValueError: a bad value.
    """
    return SamplingParams.from_dict({item.name: getattr(params, item.name) for item in fields(params)} | changes)


def record(line: PromptLine, result: Result) -> dict[str, Any]:
    """The JSON object of one answer."""
    names = ("text", "finish_reason", "stop", "prompt_tokens", "logprobs", "top_logprobs", "error")
    values = {name: getattr(result, name) for name in names}
    kept = {name: value for name, value in values.items() if value is not None}
    return {"id": line.id, "prompt": line.messages or line.text} | kept | {"new_tokens": len(result.token_ids)}


class AnswerFile:
    """JSON lines, each written when its answer is finished.

    Args:
        resume: continue a file that exists: its finished answers count, an incomplete last line is cut off.

    Attributes:
        finished: ids of finished answers.

    Raises:
        UserError: the file exists without `resume`, cannot be written, or holds something else.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.path = path
        self.finished: set[str | int] = set()
        if path.exists() and not resume:
            raise UserError(f"{path} exists; continue it with --resume, or choose another --output")
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
                break  # incomplete: the run was interrupted
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
