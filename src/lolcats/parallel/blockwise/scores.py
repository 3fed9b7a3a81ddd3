"""Scores of a model's KV heads (`lolcats.training.head_scores`), with one block of layers in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lolcats.data.retrieval import Sample
from lolcats.modeling.decoder import HIDDEN, decoder_part, run_part
from lolcats.parallel.blockwise.layers import LayerBlock
from lolcats.parallel.blockwise.partial_model import PartialModel
from lolcats.training.device import to_device
from lolcats.training.head_scores import SCORES, scoring_call


@torch.no_grad()
def score_heads(
    partial: PartialModel, blocks: Sequence[LayerBlock], samples: Sequence[Sample], report: Callable[[str], None]
) -> dict[str, dict[int, list[float]]]:
    """Means of each `SCORES` over texts, of the KV heads of each layer; hidden states wait in CPU memory.

    Args:
        report: receives a sentence for each block.

    Raises:
        UserError: the checkpoint cannot be read.
    """
    waiting = [{"input_ids": torch.from_numpy(sample.token_ids[None]).long()} for sample in samples]
    total: dict[int, Tensor] = {}
    for block in blocks:
        report(f"scoring the heads of {block}, of {len(blocks)} blocks")
        with partial.loaded(*partial.parts_of(block)):
            part = decoder_part(partial.model, block.begin, block.end)
            for number, sample in enumerate(samples):
                inputs = to_device(waiting[number], partial.device)
                waiting[number] = {HIDDEN: run_part(part, inputs, scoring_call(sample, total)).cpu()}
    means = {index: (total_2G / len(samples)).tolist() for index, total_2G in total.items()}
    return {name: {index: rows[row] for index, rows in means.items()} for row, name in enumerate(SCORES)}
