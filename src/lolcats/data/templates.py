"""From rows to documents: text segments, each marked as something to learn or only to read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from datetime import datetime
from os.path import commonprefix  # of any texts
from typing import Any, NamedTuple
from unittest.mock import patch

from transformers.utils import chat_template_utils

from lolcats.errors import UserError

# The prompts of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca, train.py), verbatim but for the
# newline after "Response:", which the published LoLCATs models were trained with.
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA_PROMPT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
CONVERSATIONS = ("messages", "conversations")
PAIRS = (
    ("instruction", "input", "output", "alpaca"),
    ("instruction", "context", "response", "alpaca"),
    ("question", "context", "answer", "alpaca"),
    ("prompt", "", "completion", "prompt"),
    ("prompt", "", "response", "prompt"),
    ("prompt", "", "answer", "prompt"),
)
"""Columns of a request, of its context and of the answer, and the format that they are read in."""
COLUMNS = {*CONVERSATIONS, "tools", "system"}.union(*(pair[:3] for pair in PAIRS)) - {""}
"""Columns that templates read, but for that of plain documents."""
CONTINUES = "_continues"
"""Column that splitting a text file adds: whether the next row belongs to the same document."""
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"} | {
    role: role for role in ("system", "developer", "user", "assistant", "tool")
}
REASONING = ("reasoning_content", "thinking", "reasoning")
"""What messages and chat templates call the thoughts before an answer."""


class _Day(datetime):
    """For templates that print today's date: the data are the same every day."""

    @classmethod
    def now(cls, tz: Any = None) -> _Day:
        return cls(2024, 7, 26, tzinfo=tz)


MARK = "<<content>>"


class Document(NamedTuple):
    """One document, or a part of one."""

    segments: list[tuple[str, bool]]
    """(text, whether its tokens are labels); each is tokenised by itself, as prompt and answer are when
    a model generates."""
    append_eos: bool = True
    """Add the end-of-sequence token, as a label."""


class SkippedRow(Exception):
    """Why a row cannot be learnt from. Reasons are counted, so they name no row."""


Template = Callable[[dict[str, Any]], list[Document]]
"""A row to its documents; raises SkippedRow, or UserError for what stops the run."""


def records(form: str, tokenizer: Any = None, column: str = "text", only: bool = False) -> Template:
    """Rows of a format and, row by row, of the others.

    Args:
        form: chat (requests with an answer go through the chat template, too), alpaca, prompt or text.
        column: of plain documents.
        only: skip rows of other formats.
    """
    converse = chat(tokenizer) if form == "chat" else None

    def template(row: dict[str, Any]) -> list[Document]:
        nonlocal converse
        messages = _conversation(row) if form == "chat" or not only else None
        pair = None if messages is not None else _pair(row, form if only and form != "chat" else None)
        if form == "chat" and pair is not None:
            asked = "\n\n".join(part for part in pair[:2] if part)
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": pair[2]}]
            messages = _with_system(messages, row)
        if messages is not None:
            converse = converse or chat(tokenizer)
            return converse(messages, _tools(row) or None)
        if pair is not None:
            request, context, answer, kind = pair
            if kind == "alpaca":
                prompt = ALPACA_PROMPT_WITH_INPUT if context else ALPACA_PROMPT
                request = prompt.format(instruction=request, input=context)
            return [Document([(request, False), (answer, True)])]
        text = _text(row, column) if form == "text" or not only else None
        if text is None or not text.strip():
            raise SkippedRow("no text" if form == "text" else "no request, or no answer to it")
        return [Document([(text, True)], append_eos=not row.get(CONTINUES))]

    return template


def request(row: dict[str, Any]) -> list[dict[str, Any]]:
    """What a row asks, answered or not: its messages up to the first of a user, or its request and context.

    Raises:
        SkippedRow: it asks nothing, or offers tools.
        UserError: its messages have another form.
    """
    if _tools(row):
        raise SkippedRow("tools, whose calls would not be answered")
    messages = _conversation(row)
    if messages is None:
        parts: Iterable[str | None]
        if (answered := _pair(row, None)) is not None:
            parts = answered[:2]
        else:
            asking = next((pair[0] for pair in PAIRS if _text(row, pair[0])), PAIRS[0][0])
            parts = (_text(row, column) for column in (asking, *(pair[1] for pair in PAIRS if pair[0] == asking)))
        text = "\n\n".join(part for part in parts if part)
        messages = _with_system([{"role": "user", "content": text}], row) if text else []
    kept = []
    for message in messages:
        known = _message(message, "")
        kept.append({name: known[name] for name in ("role", "content")})
        if known["role"] == "user":
            return kept
    raise SkippedRow("no request")


def chat(tokenizer: Any) -> Callable[[list[Any], Any], list[Document]]:
    """Conversations (messages, tools) through the tokenizer's chat template.

    Labels: what the template marks with {% generation %}; without marks, every assistant turn with its end-of-turn
    token. Turns of weight 0 are only read.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "conversations need a tokenizer with a chat template, and this one has none: use a model with a chat"
            " template, or records of instruction and output, or plain text"
        )
    source, specials = str(tokenizer.chat_template), special_tokens(tokenizer)
    marks = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None

    def render(messages: list[Any], tools: Any, prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The text, and what the template marks in it."""
        try:
            with patch.object(chat_template_utils, "datetime", _Day):  # of the templates' strftime_now
                rendered: Any = chat_template_utils.render_jinja_template(
                    conversations=[messages],
                    tools=tools,
                    chat_template=tokenizer.get_chat_template(None, tools),
                    return_assistant_tokens_mask=marks,
                    add_generation_prompt=prompt,
                    **tokenizer.special_tokens_map | {"date_string": _Day.now().strftime("%d %b %Y")},
                )
        except Exception as error:  # templates raise what they like
            raise SkippedRow(f"the chat template does not take it: {error}") from error
        return rendered[0][0], rendered[1][0] if marks else []

    def answer(messages: list[Any], turn: int, tools: Any) -> tuple[str, int, int]:
        """The conversation up to a turn, and where the turn's label begins and ends."""
        before, text = messages[:turn], render(messages[: turn + 1], tools)[0]
        asked = any(message["role"] == "user" for message in before)
        start = render(before, tools, prompt=True)[0] if asked else ""
        if not asked or not text.startswith(start):  # DeepSeek's prompt begins a thought that its answers lack
            marked = render([*before, {"role": "assistant", "content": MARK}], tools)[0].partition(MARK)[0]
            start = commonprefix([text, marked])  # noqa: RUF071
            if asked and len(start) <= len(commonprefix([text, render(before, tools)[0]])):  # noqa: RUF071
                raise UserError(
                    "the tokenizer's chat template renders an answer differently from its own generation prompt, so"
                    " prompt and answer cannot be told apart: use format alpaca or text"
                )
        if text.rstrip().endswith(specials):
            return text, len(start), len(text)
        try:  # GLM-4 ends turns by the token that begins the next
            role = "tool" if messages[turn].get("tool_calls") else "user"
            longer = render([*messages[: turn + 1], {"role": role, "content": "?"}], tools)[0]
        except SkippedRow:
            longer = ""
        following = longer.rpartition(text[-8:])[2]
        text += next((token for token in specials if following.startswith(token)), "")
        return text, len(start), len(text)

    def converse(messages: list[Any], tools: Any) -> list[Document]:
        messages = [_message(message, source) for message in messages]
        weights = [message.pop("weight", 1) for message in messages]
        assistants = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        turns = [place for place in assistants if not _unlearnt(weights[place])]
        if not turns:
            raise SkippedRow("no assistant message to learn")
        messages = messages[: turns[-1] + 1]  # what follows is never learnt from
        if marks:
            text, spans = render(messages, tools)
            if len(turns) < len(spans) == len([place for place in assistants if place <= turns[-1]]):
                spans = [span for place, span in zip(assistants, spans, strict=False) if place in turns]
            _check_printed(messages, turns, tools, text, text)
            return [Document(_split(text, spans, specials), append_eos=not text.rstrip().endswith(specials))]
        answers = []
        for turn in turns:
            opening = turn < turns[-1] and not any(message["role"] == "user" for message in messages[:turn])
            with suppress(SkippedRow) if opening else nullcontext():  # some templates want a user before
                answers.append(answer(messages, turn, tools))
                text, start, _ = answers[-1]
                _check_printed(messages[: turn + 1], [turn], tools, text, text[start:])
        whole = answers[-1][0]
        closed = [text.rstrip().endswith(specials) for text, _, _ in answers]
        if all(whole.startswith(text) for text, _, _ in answers) and all(closed[:-1]):
            spans = [(start, end) for _, start, end in answers]
            return [Document(_split(whole, spans, specials), append_eos=not closed[-1])]
        # The template rewrites earlier turns (Qwen3 drops their reasoning): one document per answer,
        # each as the model meets it when it generates that answer.
        return [
            Document(_split(text, [(start, end)], specials), append_eos=not ended)
            for (text, start, end), ended in zip(answers, closed, strict=True)
        ]

    return converse


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Texts of all special tokens, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    found = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    return tuple(sorted(found, key=len, reverse=True))


def end_of_turn(tokenizer: Any) -> int | None:
    """The token that ends an assistant's turn by the chat template, if one does."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}]
    try:
        labels = "".join(text for text, label in chat(tokenizer)(messages, None)[0].segments if label)
    except (SkippedRow, UserError):
        return None
    ending = labels.partition(MARK)[2].strip()
    found = next((token for token in special_tokens(tokenizer) if ending.startswith(token)), None)
    return None if found is None else tokenizer.convert_tokens_to_ids(found)


def _check_printed(messages: list[Any], turns: list[int], tools: Any, text: str, answers: str) -> None:
    """Raises SkippedRow if a template leaves out messages, tools, calls or thoughts: by the longest word of each."""

    def check(what: str, content: str, where: str) -> None:
        words = re.findall(r"\w+", content)
        if words and max(words, key=len) not in where:
            raise SkippedRow(f"the chat template leaves out {what}")

    for tool in tools or ():
        check("tools", str(tool.get("function", tool).get("name", "")), text)
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            check(f"messages of the role {message['role']!r}", message["content"], text)
        elif place in turns:
            for call in message.get("tool_calls", ()):
                check("tool_calls", str(call.get("function", call).get("name", "")), answers)
            for name in REASONING:
                check(name, message.get(name, ""), answers)
            check("thoughts in the content", (message["content"] or "").rpartition("</think>")[0], answers)


def _split(text: str, borders: list[tuple[int, int]], specials: tuple[str, ...]) -> list[tuple[str, bool]]:
    """Cut `text` at the answers' `borders`; white space after an end-of-turn token is not learnt."""
    segments = []
    done = 0
    for start, end in borders:
        answer = text[start:end]
        trimmed = answer.rstrip()
        if trimmed.endswith(specials):
            end = start + len(trimmed)
        segments.append((text[done:start], False))
        segments.append((text[start:end], True))
        done = end
    segments.append((text[done:], False))
    return [(part, label) for part, label in segments if part]


def _conversation(row: dict[str, Any]) -> list[Any] | None:
    """Messages of a row, those of a prompt with weight 0; None if it has other columns."""
    messages = next((row[name] for name in CONVERSATIONS if row.get(name) is not None), None)
    messages = _json(messages, "messages") if isinstance(messages, str) else messages  # from CSV
    prompt, completion = row.get("prompt"), row.get("completion")
    if messages is None and (isinstance(prompt, list) or isinstance(completion, list)):
        sides = [
            [{"role": role, "content": side}] if isinstance(side, str) else side or []
            for role, side in (("user", prompt), ("assistant", completion))
        ]
        messages = [{**message, "weight": 0} for message in sides[0]] + sides[1]
    return messages and _with_system(messages, row)


def _tools(row: dict[str, Any]) -> list[Any]:
    """Definitions, from JSON text of all or of each, too."""
    tools = row.get("tools")
    tools = _json(tools, "tools") if isinstance(tools, str) and tools.strip() else tools
    return [_json(tool, "tools") if isinstance(tool, str) else _without_none(tool) for tool in tools or ()]


def _with_system(messages: list[Any], row: dict[str, Any]) -> list[Any]:
    """Behind the row's own system message, if it has one and they begin with none."""
    system = row.get("system")
    blank = not system or (isinstance(system, str) and not system.strip())
    if blank or "system" in (messages[0].get("role"), messages[0].get("from")):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _message(message: Any, template: str) -> dict[str, Any]:
    """A message as chat templates take it: role, text, and what else it holds, under the names that they know."""
    given = _without_none(message) if isinstance(message, dict) else {}
    role = given.pop("role", given.pop("from", None))
    content = given.pop("content", given.pop("value", None))
    if role is None or not (given or content is not None or {"content", "value"} & message.keys()):
        raise UserError(f"expected messages with role and content, or from and value, got {message!r:.200}")
    role = ROLES.get(role, role)
    if role not in ("system", "user", "assistant", "tool") and not re.search(rf"['\"]{re.escape(role)}['\"]", template):
        if role != "developer":
            raise UserError(f"unknown role {role!r}: expected {', '.join(ROLES)}")
        role = "system"
    if isinstance(content, list):
        parts = [part if isinstance(part, str) else part.get("text") for part in content]
        if None in parts:
            raise SkippedRow(f"content with parts of type {content[parts.index(None)].get('type')!r}, not text")
        content = "".join(parts)
    calls = given.get("tool_calls")
    if content is None:
        if role != "assistant" or not (calls or _unlearnt(given.get("weight")) or {*REASONING} & given.keys()):
            raise SkippedRow(f"a message of the role {role!r} without content")
        content = None if calls and "is none" in template else ""
    if not isinstance(content, str | None):
        raise UserError(f"expected text as the content of a message of role {role!r}, got {type(content).__name__}")
    for call in calls or ():
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):
            function["arguments"] = _json(function["arguments"], "arguments of a tool call")
    own = next((name for name in REASONING if given.get(name)), None)
    if own is not None:
        known = [name for name in (own, *REASONING) if re.search(rf"\b{name}\b", template)]
        given[(known or [own])[0]] = given.pop(own)
    return {"role": role, "content": content, **given}


def _unlearnt(weight: Any) -> bool:
    return weight is not None and str(weight) in ("0", "0.0", "-0.0", "False")


def _without_none(value: Any) -> Any:
    """Without the keys that Arrow adds where other rows have them."""
    if isinstance(value, dict):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SkippedRow(f"{what} that are no JSON") from error


def _pair(row: dict[str, Any], form: str | None) -> tuple[str, str, str, str] | None:
    """Request, context, answer (which may be empty) and format, if a row has them; None: of any format."""
    for asking, context, answering, kind in PAIRS:
        asked, beside, answer = (_text(row, name) for name in (asking, context, answering))
        if form in (None, kind) and answer is not None and (asked or beside):
            return asked or "", beside or "", answer, kind
    return None


def _text(row: dict[str, Any], column: str) -> str | None:
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise UserError(f"expected text in column {column!r}, got {type(value).__name__}: {value!r:.80}")
    return value
