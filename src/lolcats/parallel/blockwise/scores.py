"""Exact heads by scores (`lolcats.training.head_scores`), with one block of layers in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lolcats.conversion import positions_of
from lolcats.data.retrieval import RetrievalWriter, Sample
from lolcats.modeling.cache_size import heads_in_budget
from lolcats.modeling.decoder import HIDDEN, decoder_part, run_part
from lolcats.parallel.blockwise.blocks import Blocks
from lolcats.training.checkpoint import read_json, write_json
from lolcats.training.device import to_device
from lolcats.training.head_gates import heads_picture
from lolcats.training.head_scores import SCORES, by_score, scoring_call

SCORES_FILE = "scores.json"
SCORE_TEXTS = 64


def choose_by_scores(blocks: Blocks, tokenizer: Any) -> dict[str, Any]:
    """As many exact heads as `attention.exact` allows: the report's part on them.

    The scores are kept in a file; a walk through the blocks that was preempted begins again.

    Raises:
        UserError: the budget or the texts do not fit, or the checkpoint cannot be read.
    """
    budget, section, model = blocks.config.attention.exact_budget, blocks.config.gates, blocks.partial.model
    assert budget is not None
    file, length = blocks.folder / SCORES_FILE, section.fitting_length(positions_of(model.model))
    fingerprint = blocks.identity | {"texts": {"haystack": section.haystack, "length": length, "count": SCORE_TEXTS}}
    if not file.is_file() or read_json(file)["fingerprint"] != fingerprint:
        writer = RetrievalWriter(tokenizer, "train", section.haystack, begin_token=True)
        samples = [writer.write_any(length, blocks.config.seed, number) for number in range(SCORE_TEXTS)]
        found = score_heads(blocks, samples)
        scores = {name: list(rows.items()) for name, rows in found.items()}  # numbers are no keys in JSON
        write_json(file, {"fingerprint": fingerprint, "scores": scores})
    values = {name: dict(rows) for name, rows in read_json(file)["scores"].items()}
    chosen = heads_in_budget(model.config, budget, model.model.dtype, by_score(values))
    for name, rows in values.items():
        blocks.console.print(heads_picture(rows, chosen, f"{name} scores"))
    return {"chosen_by": "scores", "budget": budget, "values": values, "chosen": chosen}


@torch.no_grad()
def score_heads(blocks: Blocks, samples: Sequence[Sample]) -> dict[str, dict[int, list[float]]]:
    """Means of each `SCORES` over texts, of the KV heads of each layer; hidden states wait in CPU memory.

    Raises:
        UserError: the checkpoint cannot be read.
    """
    partial = blocks.partial
    waiting = [{"input_ids": torch.from_numpy(sample.token_ids[None]).long()} for sample in samples]
    total: dict[int, Tensor] = {}
    for block in blocks.blocks:
        blocks.console.print(f"scoring the heads of {block}, of {len(blocks.blocks)} blocks")
        with partial.loaded(*partial.parts_of(block)):
            part = decoder_part(partial.model, block.begin, block.end)
            for number, sample in enumerate(samples):
                inputs = to_device(waiting[number], partial.device)
                waiting[number] = {HIDDEN: run_part(part, inputs, scoring_call(sample, total)).cpu()}
    means = {index: (total_2G / len(samples)).tolist() for index, total_2G in total.items()}
    return {name: {index: rows[row] for index, rows in means.items()} for row, name in enumerate(SCORES)}
