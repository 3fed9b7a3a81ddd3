"""Passkey retrieval: accuracy by length of the text and by where in it the passkey stands.

As in arXiv:2410.10254, appendix "Matching Linearizing Data to Downstream (Retrieval) Task": five digits, exact
match, depth in ten equal parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from lolcats.data.passkey import EVALUATION_STREAM, PasskeySample, PasskeyWriter
from lolcats.generation.decoding import continuations
from lolcats.generation.sampling import SamplingParams

LENGTHS = (2048, 4096, 6144, 8192, 10240)
DECILES = 10


def passkey_samples(
    tokenizer: Any, length: int, per_decile: int, seed: int = 0
) -> list[tuple[int, int, PasskeySample]]:
    """(passkey, decile, sample), `per_decile` for each tenth of the text, at random depths within it.

    Args:
        length: tokens of prompt and answer, special tokens included.
    """
    writer = PasskeyWriter(tokenizer, add_special_tokens=True)
    samples = []
    for decile in range(DECILES):
        for index in range(per_decile):
            generator = np.random.default_rng([EVALUATION_STREAM, seed, length, decile, index])
            passkey = int(generator.integers(10_000, 100_000))
            depth = (decile + float(generator.random())) / DECILES
            samples.append((passkey, decile, writer.write(passkey, depth, length)))
    return samples


def passkey_accuracy(
    model: Any,
    tokenizer: Any,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    per_decile: int = 10,
    seed: int = 0,
    batch_size: int = 16,
    chunk: int = 2048,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Retrieval accuracy, one entry for each length.

    Returns:
        length, accuracy, stderr, deciles (accuracy in each tenth), samples, tokens (mean, of the prompts).

    Raises:
        UserError: a length that does not hold the text.
    """
    results, done, total = [], 0, len(lengths) * DECILES * per_decile
    for length in lengths:
        samples = passkey_samples(tokenizer, length, per_decile, seed)
        prompts = [tokenizer(sample.prompt, verbose=False)["input_ids"] for _, _, sample in samples]
        answer = max(len(tokenizer(item.answer, add_special_tokens=False)["input_ids"]) for _, _, item in samples)
        rows = max(1, min(batch_size, 65536 // length))
        answers = []
        for begin in range(0, len(prompts), rows):
            # One more token shows whether the number ends there.
            batch = prompts[begin : begin + rows]
            params = SamplingParams(max_new_tokens=answer + 2)
            answers += continuations(model, batch, params, batch_size=rows, chunk=chunk)
            done += len(batch)
            if on_progress is not None:
                on_progress(done, total)
        right = [
            is_passkey(tokenizer.decode(tokens, skip_special_tokens=True), passkey)
            for tokens, (passkey, _, _) in zip(answers, samples, strict=True)
        ]
        accuracy = sum(right) / len(right)
        results.append(
            {
                "length": length,
                "accuracy": accuracy,
                "stderr": math.sqrt(accuracy * (1 - accuracy) / max(1, len(right) - 1)),
                "deciles": [
                    sum(right[first : first + per_decile]) / per_decile for first in range(0, len(right), per_decile)
                ],
                "samples": len(right),
                "tokens": sum(map(len, prompts)) / len(prompts),
            }
        )
    return results


def is_passkey(text: str, passkey: int) -> bool:
    """Whether a model's continuation begins with exactly this number."""
    match = re.match(r"\s*(\d+)", text)
    return match is not None and match[1] == str(passkey)
