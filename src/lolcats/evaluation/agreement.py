"""How well a model generates, which likelihood does not tell.

Agreement with a teacher's greedy continuation, exact match with reference answers, repetition, and samples to
read. A model agrees with the teacher's first n tokens exactly if it predicts each of them from the ones before,
so that one teacher-forced pass gives both numbers of agreement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lolcats.config import DataSection
from lolcats.data import templates
from lolcats.data.sources import detect_format, open_source
from lolcats.errors import UserError
from lolcats.generation.decoding import continuations, pad_left
from lolcats.generation.sampling import SamplingParams
from lolcats.generation.text import end_tokens

SPANS = (64, 256)
PROMPT_TOKENS = 64  # taken from the beginning of a plain document
SAMPLES = 5


@dataclass(frozen=True)
class GenerationPrompt:
    """A text to continue; `answer` is the reference, None for plain documents."""

    text: str
    answer: str | None = None


def generation_prompts(data: DataSection, tokenizer: Any, count: int) -> list[GenerationPrompt]:
    """The first `count` prompts of all sources: instructions with their answers, or beginnings of documents.

    Raises:
        UserError: data that cannot be used, or none.
    """
    prompts: list[GenerationPrompt] = []
    with TemporaryDirectory(prefix="lolcats-") as scratch:
        for source in data.sources:
            rows = open_source(source).rows(Path(scratch), evaluation=True)
            columns = list(rows.column_names)
            form = detect_format(source, columns)
            several = 4 if form == "text" else 1  # some texts are too short
            first = rows.select(range(min(several * count, len(rows))))
            found = [_prompt(row, form, source.text_column or "text", tokenizer) for row in first]
            prompts += [prompt for prompt in found if prompt is not None]
    if not prompts:
        raise UserError(
            "no prompts to generate from: give records with instruction and output, with prompt and answer, or plain"
            " documents"
        )
    return prompts[:count]


@torch.no_grad()
def agreement(
    model: Any,
    tokenizer: Any,
    prompts: list[GenerationPrompt],
    teacher: list[list[int]],
    *,
    spans: Sequence[int] = SPANS,
    batch_size: int = 16,
) -> list[dict[str, Any]]:
    """How far the model's greedy continuation is the teacher's, one entry for each span of tokens.

    Returns:
        span; matching_prefix, the mean number of tokens until the continuations part, and its stderr;
        equal_share, the share of the teacher's tokens that the model predicts given the ones before, and its
        stderr over prompts; teacher_tokens, the mean length of what is compared.
    """
    longest = max(spans)
    device = next(model.parameters()).device
    equal: list[list[bool]] = []
    for begin in range(0, len(prompts), batch_size):
        targets = [tokens[:longest] for tokens in teacher[begin : begin + batch_size]]
        texts = [tokenizer(prompt.text)["input_ids"] for prompt in prompts[begin : begin + batch_size]]
        # The last token predicts what comes after the span, and need not be read.
        rows = [list(text) + tokens[:-1] for text, tokens in zip(texts, targets, strict=True)]
        ids_BT, mask_BT = pad_left(rows, device)
        width = max(map(len, targets))
        logits_BTV = model(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            position_ids=(mask_BT.cumsum(1) - 1).clamp_min(0),
            use_cache=False,
            logits_to_keep=width,
        ).logits
        for predicted, tokens in zip(logits_BTV.argmax(-1).tolist(), targets, strict=True):
            last = predicted[len(predicted) - len(tokens) :]
            equal.append([one == other for one, other in zip(last, tokens, strict=True)])
    return [_agreement(equal, span) for span in spans]


def repetition_rate(tokens: list[int], n: int = 4) -> float | None:
    """Share of n-grams that occurred before in the same text; None for texts without any."""
    grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return None if not grams else 1.0 - len(set(grams)) / len(grams)


def exact_match(text: str, answer: str) -> bool:
    """Whether a generated text is the reference, up to white space."""
    return " ".join(text.split()) == " ".join(answer.split())


def generation_quality(
    model: Any,
    tokenizer: Any,
    prompts: list[GenerationPrompt],
    *,
    teacher: list[list[int]] | None = None,
    spans: Sequence[int] = SPANS,
    batch_size: int = 16,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], list[list[int]]]:
    """All numbers on generation, and the greedy continuations themselves.

    Args:
        teacher: the teacher's continuations of the same prompts, with the same tokenizer; None: no agreement.

    Returns:
        Also token ids; the end token is the last one if the model ended the text.
    """
    ids = [tokenizer(prompt.text)["input_ids"] for prompt in prompts]
    params = SamplingParams(max_new_tokens=max(spans))
    ends = end_tokens(model)
    generated = continuations(model, ids, params, ends=ends, batch_size=batch_size, on_progress=on_progress)
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in generated]
    pairs = list(zip(prompts, texts, strict=True))
    result: dict[str, Any] = {
        "prompts": len(prompts),
        "mean_tokens": sum(map(len, generated)) / len(generated),
        **_mean("repetition", [rate for rate in map(repetition_rate, generated) if rate is not None]),
        **_mean(
            "exact_match", [exact_match(text, prompt.answer) for prompt, text in pairs if prompt.answer is not None]
        ),
        "samples": [{"prompt": prompt.text, "answer": prompt.answer, "text": text} for prompt, text in pairs[:SAMPLES]],
    }
    if teacher is not None:
        result["agreement"] = agreement(model, tokenizer, prompts, teacher, spans=spans, batch_size=batch_size)
    return result, generated


def _agreement(equal: list[list[bool]], span: int) -> dict[str, Any]:
    cut = [row[:span] for row in equal]
    tokens = sum(map(len, cut))
    return {
        "span": span,
        **_mean("matching_prefix", [row.index(False) if False in row else len(row) for row in cut]),
        **_mean("equal_share", [sum(row) / len(row) for row in cut]),
        "equal_share": sum(map(sum, cut)) / tokens,
        "teacher_tokens": tokens / len(cut),
    }


def _prompt(row: dict[str, Any], form: str, text_column: str, tokenizer: Any) -> GenerationPrompt | None:
    if form == "text":
        ids = tokenizer(row[text_column] or "", add_special_tokens=False, verbose=False)["input_ids"]
        too_short = len(ids) < PROMPT_TOKENS
        return None if too_short else GenerationPrompt(tokenizer.decode(ids[:PROMPT_TOKENS]))
    if form not in ("chat", "alpaca", "prompt"):
        raise UserError(f"format {form} holds no prompts to generate from; use instruction records or plain text")
    try:
        documents = templates.records(form, tokenizer, text_column)(row)
    except templates.SkippedRow:
        return None
    (prompt, _), (answer, _) = documents[0].segments[:2]
    return GenerationPrompt(prompt, answer)


def _mean(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Mean of values as `name` and its standard error as `name_stderr`; None where there are too few."""
    mean, stderr = None, None
    if values:
        mean = sum(values) / len(values)
    if mean is not None and len(values) > 1:
        stderr = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    return {name: mean, f"{name}_stderr": stderr}
