"""Perplexity on packed data: exp of the mean negative log-likelihood of the labelled tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lolcats.config import DataSection
from lolcats.data import PackedDataset, build_evaluation_dataset
from lolcats.errors import UserError
from lolcats.modeling.call import AttentionCall
from lolcats.parallel.group import SINGLE, Group


def perplexity(
    model: nn.Module,
    tokenizer: Any,
    data: DataSection,
    *,
    batch_size: int = 8,
    on_batch: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Perplexity of a causal model over all rows of `data`; see `dataset_perplexity`."""
    dataset = build_evaluation_dataset(data, tokenizer)
    return dataset_perplexity(model, dataset, batch_size=batch_size, on_batch=on_batch)


@torch.no_grad()
def dataset_perplexity(
    model: nn.Module,
    dataset: PackedDataset,
    *,
    batch_size: int = 8,
    on_batch: Callable[[int, int], None] | None = None,
    group: Group = SINGLE,
    attention_call: AttentionCall | None = None,
) -> dict[str, Any]:
    """Perplexity of a causal model over all labelled tokens of `dataset`.

    Args:
        model: returns `.logits` [B, T, V]; its mode (train or eval) is left as it is.
        on_batch: called with (sequences done, sequences in all) after every batch of this process.
        group: the processes that share the batches; all get the result.
        attention_call: what a linearized model's layers compute; None: hybrid attention.

    Returns:
        perplexity, loss (nats per token), tokens (labels counted).

    Raises:
        UserError: no token has a label.
    """
    device = getattr(model, "device", None) or next(model.parameters()).device
    extra = {} if attention_call is None else {"attention_call": attention_call}
    total, count = 0.0, 0
    for indices, counts in group.share(batches_of(dataset, batch_size)):
        batch = {name: tensor.to(device) for name, tensor in dataset.batch(indices).items()}
        labels = batch.pop("labels")[:, 1:]
        wanted = labels != -100
        logits = model(**batch, use_cache=False, **extra).logits[:, :-1][wanted]
        if not counts:
            continue
        for part_logits, part_labels in zip(logits.split(2048), labels[wanted].split(2048), strict=True):
            total += float(cross_entropy(part_logits.float(), part_labels, reduction="sum"))
        count += int(wanted.sum())
        if on_batch is not None:
            on_batch(indices[-1] + 1, len(dataset))
    total, count = group.total([total])[0], sum(group.gather(count))
    if count == 0:
        raise UserError(
            f"no token to score: none of the {len(dataset)} sequences has a label. Answers may be missing, or cut off"
            " by --sequence-length; --loss-on all (data.loss_on) scores every token"
        )
    loss = total / count
    return {"perplexity": math.exp(loss) if loss < 700 else math.inf, "loss": loss, "tokens": count}


def batches_of(dataset: PackedDataset, batch_size: int, *, first: int | None = None) -> list[list[int]]:
    """All sequences, or the first so many, in their order; the last batch may be smaller."""
    indices = list(range(len(dataset)))[:first]
    return [indices[begin : begin + batch_size] for begin in range(0, len(indices), batch_size)]
