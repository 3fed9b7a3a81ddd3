"""From rows to documents: text segments, each marked as something to learn or only to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset

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
MMLU_HEADER = "The following are multiple choice questions (with answers) about common sense.\n\n"
CHOICE_COLUMNS = ("question", "choices", "answerKey")
COLUMNS = {"messages", "instruction", "input", "output", "prompt", "answer", "passkey", "depth"}
"""Columns that templates read, but for that of plain documents."""
CONTINUES = "_continues"
"""Column that splitting a text file adds: whether the next row belongs to the same document."""


class Document(NamedTuple):
    """One document, or a part of one."""

    segments: list[tuple[str, bool]]
    """(text, whether its tokens are labels); each is tokenised by itself, as prompt and answer are when
    a model generates."""
    append_eos: bool = True
    """Add the end-of-sequence token, as a label."""
    continues: bool = False
    """The next document belongs to this one: no border between them."""


Template = Callable[[dict[str, Any]], list[Document]]
"""A row to its documents; an empty list skips the row."""


def alpaca(row: dict[str, Any]) -> list[Document]:
    """instruction, input (may be missing or empty) and output; an empty output is a valid answer."""
    asked = _alpaca(row)
    if asked is None:
        return []
    instruction, context, output = asked
    template = ALPACA_PROMPT_WITH_INPUT if context else ALPACA_PROMPT
    prompt = template.format(instruction=instruction, input=context)
    return [Document([(prompt, False), (output, True)])]


def plain_text(column: str) -> Template:
    """Whole documents; every token is a label."""

    def template(row: dict[str, Any]) -> list[Document]:
        text = _text(row, column)
        if text is None or not text.strip():
            return []
        continues = bool(row.get(CONTINUES))
        return [Document([(text, True)], append_eos=not continues, continues=continues)]

    return template


def chat(tokenizer: Any) -> Template:
    """`messages` (role, content), or alpaca columns, through the tokenizer's chat template.

    Labels: every assistant turn with its end-of-turn token. The template itself ends the document.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "format chat needs a tokenizer with a chat template, and this one has none: "
            "use format alpaca or text, or a model with a chat template"
        )
    specials = tuple(tokenizer.all_special_tokens)

    def render(messages: list[dict[str, str]], prompt: bool = False) -> str:
        # Templates of the Llama 3 family print a date; a fixed one keeps the data the same every day.
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, date_string="26 Jul 2024"
        )

    def template(row: dict[str, Any]) -> list[Document]:
        messages = _messages(row)
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            return []
        before = [render(messages[:turn], prompt=True) for turn in turns]
        after = [render(messages[: turn + 1]) for turn in turns]
        whole = after[-1]  # what follows the last answer is never learnt from
        if all(whole.startswith(end) and end.startswith(start) for start, end in zip(before, after, strict=True)):
            borders = [(len(start), len(end)) for start, end in zip(before, after, strict=True)]
            return [Document(_split(whole, borders, specials), append_eos=False)]
        # The template rewrites earlier turns (Qwen3 drops their reasoning): one document per answer,
        # each as the model meets it when it generates that answer.
        documents = []
        for start, end in zip(before, after, strict=True):
            if not end.startswith(start):
                raise UserError(
                    "the tokenizer's chat template renders an answer differently from its own generation "
                    "prompt, so prompt and answer cannot be told apart: use format alpaca or text"
                )
            documents.append(Document(_split(end, [(len(start), len(end))], specials), append_eos=False))
        return documents

    return template


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


def _messages(row: dict[str, Any]) -> list[dict[str, str]]:
    if "messages" not in row:
        asked = _alpaca(row)
        if asked is None:
            return []
        instruction, context, output = asked
        request = "\n\n".join(part for part in (instruction, context) if part)
        return [{"role": "user", "content": request}, {"role": "assistant", "content": output}]
    messages = row["messages"] or []
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise UserError(f"expected messages with role and content, got {message!r:.200}")
        if not isinstance(message["content"], str):
            kind = type(message["content"]).__name__
            raise UserError(f"expected text as the content of a {message['role']} message, got {kind}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _alpaca(row: dict[str, Any]) -> tuple[str, str, str] | None:
    """instruction, input and output; None if there is nothing to answer, or no answer."""
    instruction, context, output = (_text(row, column) for column in ("instruction", "input", "output"))
    if output is None or not (instruction or context):
        return None
    return instruction or "", context or "", output


def _text(row: dict[str, Any], column: str) -> str | None:
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise UserError(f"expected text in column {column!r}, got {type(value).__name__}: {value!r:.80}")
    return value


def few_shot(rows: Dataset, seed: int, questions: int = 5) -> Dataset:
    """Multiple-choice questions in MMLU's few-shot format: one row {prompt, answer} for each of `rows`, the question
    after `questions - 1` others with their answers, as arXiv:2410.10254 trains on CommonsenseQA (appendix, "Matching
    Linearizing Data to Downstream Task").

    The others are drawn from the same rows, without the question itself. Validation rows therefore see no
    training question, and the other way round, if the two are split before.

    Args:
        rows: question, choices {label, text}, answerKey, as in CommonsenseQA and ARC.

    Raises:
        UserError: too few rows, or a row of another form.
    """
    if len(rows) < questions:
        raise UserError(
            f"multiple-choice samples hold {questions} questions, and there are only {len(rows)} rows in the training"
            " or validation split: give more, or raise data.validation_rows"
        )
    shown, answers = [], []
    for number, row in enumerate(rows.select_columns(list(CHOICE_COLUMNS))):
        text, answer = _question(row, number)
        shown.append(text)
        answers.append(answer)
    samples: dict[str, list[str]] = {"prompt": [], "answer": []}
    for index in range(len(shown)):
        generator = np.random.default_rng([seed, index])
        others = generator.choice(len(shown) - 1, size=questions - 1, replace=False)
        picked = [int(other) + (other >= index) for other in others]
        examples = "".join(f"{shown[other]} {answers[other]}\n\n" for other in picked)
        samples["prompt"].append(MMLU_HEADER + examples + shown[index])
        samples["answer"].append(f" {answers[index]}")
    return Dataset.from_dict(samples)


def multiple_choice(row: dict[str, Any]) -> list[Document]:
    """Rows of `few_shot`; the last answer's letter is the label."""
    return [Document([(row["prompt"], False), (row["answer"], True)])]


def _question(row: dict[str, Any], number: int) -> tuple[str, str]:
    """The question with lettered choices up to "Answer:", and the right letter."""
    labels, texts = row["choices"]["label"], row["choices"]["text"]
    if row["answerKey"] not in labels:
        raise UserError(
            f"row {number} (counted from 0): answerKey {row['answerKey']!r} is none of the choices' labels"
            f" {list(labels)}; use a split with answers"
        )
    letters = "ABCDEFGHIJ"[: len(labels)]
    lines = [row["question"].strip(), *(f"{letter}. {text}" for letter, text in zip(letters, texts, strict=True))]
    return "\n".join([*lines, "Answer:"]), letters[labels.index(row["answerKey"])]
