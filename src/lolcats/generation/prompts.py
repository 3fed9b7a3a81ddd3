"""Files of prompts in, files of answers out, so that an interrupted run can be resumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from lolcats.errors import UserError
from lolcats.generation.engine import Engine
from lolcats.generation.request import Result
from lolcats.generation.sampling import SamplingParams, explain
from lolcats.generation.text import chat_text, prompt_tokens


@dataclass(frozen=True)
class PromptLine:
    """One prompt of a file or of the command line.

    Attributes:
        number: place among all prompts, from 0.
        id: names the answer; the number unless the file gives one.
        text: the prompt; of a conversation, its last message.
        messages: a conversation to continue, instead of text.
        params: entries of `SamplingParams` of this prompt alone.
    """

    number: int
    id: str | int
    text: str
    messages: list[dict[str, Any]] | None = None
    params: dict[str, Any] = field(default_factory=dict)


class _JsonLine(SamplingParams):
    """What a line of JSON may hold."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    id: str | int | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> _JsonLine:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError('expected either "prompt" (text) or "messages" (a list)')
        return self


def read_prompts(texts: list[str], file: Path | None) -> list[PromptLine]:
    """The prompts `texts`, then those of a text file, one a line, or of JSON lines (`.jsonl`): {"prompt": ..., ...}.

    Raises:
        UserError: the file cannot be read, a line is not a prompt (with the line's number), or two have the same id.
    """
    prompts = [PromptLine(index, index, text) for index, text in enumerate(texts)]
    try:
        lines = [] if file is None else file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --prompts-file {file}: {error}") from error
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        if line.strip():
            prompts.append(_from_line(line, len(prompts), file, number))
    for identity, count in Counter(prompt.id for prompt in prompts).items():
        if count > 1:
            raise UserError(f"{count} prompts have the id {identity!r}; give each its own")
    return prompts


def _from_line(line: str, index: int, file: Path | None, number: int) -> PromptLine:
    if file is None or file.suffix != ".jsonl":
        return PromptLine(index, index, line)
    try:
        values = _JsonLine.model_validate_json(line)
    except ValidationError as error:
        raise UserError(f"{file}, line {number}: {explain(error.errors()[0])[1]}") from error
    text = values.prompt or str((values.messages or [{}])[-1].get("content", ""))
    params = values.model_dump(include=set(SamplingParams.model_fields), exclude_unset=True)
    return PromptLine(index, index if values.id is None else values.id, text, values.messages, params)


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
            seed = {} if params.seed is None else {"seed": params.seed + line.number}
            tokens = prompt_tokens(engine.tokenizer, line.messages or line.text, chat)
            yield index, (tokens, params.changed(**(seed | line.params)))

    for index, result in engine.as_completed(requests()):
        yield lines[index], result


def record(line: PromptLine, result: Result) -> dict[str, Any]:
    """The JSON object of one answer."""
    names = ("text", "finish_reason", "stop", "prompt_tokens", "logprobs", "top_logprobs", "error")
    values = {name: getattr(result, name) for name in names}
    kept = {name: value for name, value in values.items() if value not in (None, [])}
    return {"id": line.id, "prompt": line.messages or line.text} | kept | {"new_tokens": len(result.token_ids)}


class AnswerFile(AbstractContextManager["AnswerFile"]):
    """JSON lines, each written when its answer is finished.

    Args:
        resume: continue a file that exists: its finished answers count, an incomplete last line is cut off.

    Attributes:
        finished: ids of finished answers.

    Raises:
        UserError: the file exists without `resume`, cannot be written, or holds something else.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.finished: set[str | int] = set()
        if path.exists() and not resume:
            raise UserError(f"{path} exists; continue it with --resume, or choose another --output")
        try:
            keep = self._read_finished(path) if path.exists() else 0
            self._stream = path.open("ab")
            self._stream.truncate(keep)
        except OSError as error:
            raise UserError(f"cannot write --output {path}: {error}") from error

    def _read_finished(self, path: Path) -> int:
        """Length of the part that holds whole lines, in bytes."""
        keep = 0
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break  # incomplete: the run was interrupted
            keep += len(line)
            try:
                values = json.loads(line)
                identity, _ = values["id"], values["prompt"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{path}, line {number}: not an answer of `lolcats generate`; choose another --output"
                ) from error
            if values.get("finish_reason", "stop") in ("stop", "length"):
                self.finished.add(identity)
        return keep

    def write(self, values: dict[str, Any]) -> None:
        self._stream.write((json.dumps(values, ensure_ascii=False) + "\n").encode())
        self._stream.flush()

    def __exit__(self, *_: object) -> None:
        self._stream.close()
