"""Perplexity of packed sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from lolcats.data import PackedDataset
from lolcats.data.packed import IGNORED
from lolcats.errors import UserError
from lolcats.modeling.attention import AttentionCall
from lolcats.parallel.group import SINGLE, Group


def token_losses(logits_MV: Tensor, target_M: Tensor) -> Tensor:
    """-log p of the targets (nats): [M].

    In float32 whatever the model's type is: bfloat16 would tie answers that differ. In pieces, because float32 logits
    of all positions would fill memory.
    """
    pieces = zip(logits_MV.split(2048), target_M.split(2048), strict=True)
    return torch.cat([cross_entropy(logits.float(), targets, reduction="none") for logits, targets in pieces])


@torch.no_grad()
def dataset_perplexity(
    model: nn.Module,
    dataset: PackedDataset,
    *,
    batch_size: int = 8,
    group: Group = SINGLE,
    attention_call: AttentionCall | None = None,
    graphs: Callable[..., dict[str, Tensor]] | None = None,
) -> dict[str, Any]:
    """Perplexity of a causal model over all labelled tokens of `dataset`.

    Args:
        model: returns `.logits` [B, T, V]; its mode (train or eval) is left as it is.
        group: the processes that share the batches; all get the result.
        attention_call: what a linearized model's layers compute; None: hybrid attention.
        graphs: calls `batch_losses`, see `lolcats.training.graphs.Graphs`; None: it is called as it is.

    Returns:
        perplexity, loss (nats per token), tokens (labels counted).
    """
    device = getattr(model, "device", None) or next(model.parameters()).device
    losses: Callable[..., Any] = batch_losses if graphs is None else partial(graphs, batch_losses)

    def measure(indices: list[int]) -> tuple[Tensor, int]:
        batch = {name: tensor.to(device) for name, tensor in dataset.batch(indices).items()}
        losses_N = losses(batch, model=model, attention_call=attention_call)["losses"]
        return losses_N[None], dataset.labels(indices)

    sums, count = group.sums(batches_of(dataset, batch_size), measure)
    if count == 0:
        raise UserError(
            f"no token to score: none of the {len(dataset)} sequences has a label. Answers may be missing, or cut off"
            " by --sequence-length; --loss-on all (data.loss_on) scores every token"
        )
    return perplexity_of(sums[0], count)


@torch.no_grad()
def batch_losses(
    batch: dict[str, Tensor], *, model: nn.Module, attention_call: AttentionCall | None
) -> dict[str, Tensor]:
    """ "losses" [B * T] of predicting each position's successor (nats, float32), 0 where that is no label.

    Nothing in it depends on where labels are, so that a CUDA graph may hold it.
    """
    extra = {} if attention_call is None else {"attention_call": attention_call}
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits_NV = model(**inputs, use_cache=False, **extra).logits.flatten(0, 1)
    next_BT = pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return {"losses": token_losses(logits_NV, next_BT.flatten())}


def batches_of(dataset: PackedDataset, batch_size: int) -> list[list[int]]:
    """All sequences in their order; the last batch may be smaller."""
    indices = list(range(len(dataset)))
    return [indices[begin : begin + batch_size] for begin in range(0, len(indices), batch_size)]


def perplexity_of(total: float, count: int) -> dict[str, Any]:
    """`dataset_perplexity`'s result, from the summed loss in nats and the number of tokens."""
    loss = total / max(count, 1)
    return {"perplexity": math.exp(loss) if loss < 700 else math.inf, "loss": loss, "tokens": count}
