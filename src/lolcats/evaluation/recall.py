"""Recall: whether a model finds again what stands in its context (`lolcats.data.retrieval`).

An answer counts if each of its tokens is the likeliest after those before it, which is what greedy decoding would
have written; so one forward pass measures it. Copies count by the token, all other kinds by the answer.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from lolcats.data.retrieval import KINDS, RetrievalWriter, Sample

TOKENS_AT_A_TIME = 32768
RECALL: dict[str, Any] = {"kinds": KINDS, "lengths": (1024, 2048, 4096, 8192), "samples": 50}
PASSKEY: dict[str, Any] = {"kinds": ("passkey",), "lengths": (2048, 4096, 6144, 8192, 10240), "samples": 100}


@torch.no_grad()
def recall_accuracy(
    model: Any,
    tokenizer: Any,
    *,
    kinds: tuple[str, ...] = RECALL["kinds"],
    lengths: tuple[int, ...] = RECALL["lengths"],
    samples: int = RECALL["samples"],
    seed: int = 0,
    haystack: str = "demo",
) -> list[dict[str, Any]]:
    """Accuracy, one entry for each kind and length in which it fits.

    Args:
        kinds: some of `KINDS`, or "passkey".
        lengths: tokens of the texts.
        samples: texts of each kind and length.
        haystack: the text around, as a data source (`haystack_text`).

    Returns:
        kind, length, accuracy (a share), stderr (over texts), samples, depths: the accuracy for each tenth of the text
        in which answers stand, None where none does.
    """
    write = RetrievalWriter(tokenizer, "test", haystack, begin_token=True).write
    copied = {kind: int(kind.removeprefix("copy_")) for kind in kinds if kind.startswith("copy_")}  # tokens
    plan = [(kind, length) for kind in kinds for length in lengths if 2 * copied.get(kind, 0) <= length]
    results = []
    for kind, length in plan:
        written = [write(kind, length, seed, index) for index in range(samples)]
        rows = max(1, TOKENS_AT_A_TIME // length)
        answers: list[list[tuple[int, bool]]] = []
        for begin in range(0, samples, rows):
            answers += _answers(model, written[begin : begin + rows])
        shares = [sum(right for _, right in found) / len(found) for found in answers]
        tenths = [[right for found in answers for tenth, right in found if tenth == n] for n in range(10)]
        accuracy = sum(shares) / samples
        spread = math.sqrt(sum((share - accuracy) ** 2 for share in shares) / max(1, samples - 1))
        results.append(
            {
                "kind": kind,
                "length": length,
                "accuracy": accuracy,
                "stderr": spread / math.sqrt(samples),
                "samples": samples,
                "depths": [sum(found) / len(found) if found else None for found in tenths],
            }
        )
    return results


def _answers(model: Any, batch: list[Sample]) -> list[list[tuple[int, bool]]]:
    """For each answer of each text the tenth of the text in which it stands, and whether the model gives it."""
    ids_BT = torch.from_numpy(np.stack([sample.token_ids for sample in batch])).long().to(model.device)
    first = int(np.any([sample.answer >= 0 for sample in batch], axis=0).argmax())
    kept = ids_BT.shape[1] - first + 1  # the token before the first answer predicts it
    logits_BKV = model(input_ids=ids_BT, use_cache=False, logits_to_keep=kept).logits
    right_BK = (logits_BKV[:, :-1].argmax(-1) == ids_BT[:, first:]).cpu().numpy()
    found = []
    for right, sample in zip(right_BK, batch, strict=True):
        numbers = range(sample.answer.max() + 1)
        depths = [int((sample.source == number).argmax()) * 10 // ids_BT.shape[1] for number in numbers]
        given = [bool(right[sample.answer[first:] == number].all()) for number in numbers]
        found.append(list(zip(depths, given, strict=True)))
    return found
