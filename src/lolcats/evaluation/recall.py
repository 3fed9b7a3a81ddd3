"""Recall: whether a model finds again what stands in its context (`lolcats.data.retrieval`).

An answer counts if each of its tokens is the likeliest after those before it, which is what greedy decoding would
have written; so one forward pass measures it. Copies count by the token, all other kinds by the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lolcats.data.retrieval import KINDS, RetrievalWriter

TOKENS_AT_A_TIME = 32768
RECALL_LENGTHS = (1024, 2048, 4096, 8192)
RECALL_SAMPLES = 50


@torch.no_grad()
def recall_accuracy(
    model: Any,
    tokenizer: Any,
    *,
    kinds: tuple[str, ...] = KINDS,
    lengths: tuple[int, ...] = RECALL_LENGTHS,
    samples: int = RECALL_SAMPLES,
    seed: int = 0,
    haystack: str = "demo",
    on_progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Accuracy, one entry for each kind and length in which it fits.

    Args:
        lengths: tokens of the texts.
        samples: texts of each kind and length.
        haystack: the text around, as a data source; its last fifth is used.

    Returns:
        kind, length, accuracy (a share), stderr (over texts), samples.
    """
    writer = RetrievalWriter(tokenizer, "test", haystack, begin_token=True)
    plan = [(kind, length) for kind in kinds for length in lengths if not _is_too_long(kind, length)]
    results = []
    for done, (kind, length) in enumerate(plan):
        written = [writer.write(kind, length, seed, index) for index in range(samples)]
        rows = max(1, TOKENS_AT_A_TIME // length)
        shares: list[float] = []
        for begin in range(0, samples, rows):
            shares += _shares(model, [written[place] for place in range(begin, min(begin + rows, samples))])
        accuracy = sum(shares) / samples
        spread = math.sqrt(sum((share - accuracy) ** 2 for share in shares) / max(1, samples - 1))
        results.append(
            {
                "kind": kind,
                "length": length,
                "accuracy": accuracy,
                "stderr": spread / math.sqrt(samples),
                "samples": samples,
            }
        )
        if on_progress is not None:
            on_progress(done + 1, len(plan))
    return results


def _is_too_long(kind: str, length: int) -> bool:
    name, _, count = kind.partition("_")
    return name == "copy" and 2 * int(count) > length


def _shares(model: Any, batch: list[Any]) -> list[float]:
    """The share of each text's answers that the model gives."""
    ids_BT = torch.from_numpy(np.stack([sample.token_ids for sample in batch])).long().to(model.device)
    answer_BT = np.stack([sample.answer for sample in batch])
    first = int((answer_BT >= 0).any(0).argmax())
    kept = ids_BT.shape[1] - first + 1  # the token before the first answer predicts it
    logits_BKV = model(input_ids=ids_BT, use_cache=False, logits_to_keep=kept).logits
    right_BK = (logits_BKV[:, :-1].argmax(-1) == ids_BT[:, first:]).cpu().numpy()
    shares = []
    for right, answer in zip(right_BK, answer_BT[:, first:], strict=True):
        numbers = [number for number in np.unique(answer) if number >= 0]
        shares.append(sum(bool(right[answer == number].all()) for number in numbers) / len(numbers))
    return shares
