"""Perplexity: of packed sequences, and of a long text by position: does a model hold past its training length?

Windows of a text go through the model in pieces, with its cache between them, so that memory is that of one piece and
of the cache: constant for a linearized model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import DynamicCache

from lolcats.data import PackedDataset
from lolcats.data.packed import IGNORED
from lolcats.errors import UserError
from lolcats.modeling.call import AttentionCall
from lolcats.modeling.compat import CACHE
from lolcats.parallel.group import SINGLE, Group

PIECE = 2048  # most tokens, of all windows in a batch together, that go through the model at a time


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
    losses: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> dict[str, Any]:
    """Perplexity of a causal model over all labelled tokens of `dataset`.

    Args:
        model: returns `.logits` [B, T, V]; its mode (train or eval) is left as it is.
        group: the processes that share the batches; all get the result.
        attention_call: what a linearized model's layers compute; None: hybrid attention.
        losses: what computes `batch_losses` of a batch on the model's device, as a CUDA graph say; None: that itself.

    Returns:
        perplexity, loss (nats per token), tokens (labels counted).
    """
    device = getattr(model, "device", None) or next(model.parameters()).device
    losses = losses or partial(batch_losses, model, attention_call=attention_call)

    def measure(indices: list[int]) -> tuple[Tensor, int]:
        batch = dataset.batch(indices)
        losses_N = losses({name: tensor.to(device) for name, tensor in batch.items()})["losses"]
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
    model: nn.Module, batch: dict[str, Tensor], *, attention_call: AttentionCall | None = None
) -> dict[str, Tensor]:
    """ "losses" [B * T] of predicting each position's successor (nats, float32), 0 where that is no label.

    Nothing in it depends on where labels are, so that a CUDA graph may hold it.
    """
    extra = {} if attention_call is None else {"attention_call": attention_call}
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits_NV = model(**inputs, use_cache=False, **extra).logits.flatten(0, 1)
    next_BT = pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return {"losses": token_losses(logits_NV, next_BT.flatten())}


def batches_of(dataset: PackedDataset, batch_size: int, *, first: int | None = None) -> list[list[int]]:
    """All sequences, or the first so many, in their order; the last batch may be smaller."""
    indices = list(range(len(dataset)))[:first]
    return [indices[begin : begin + batch_size] for begin in range(0, len(indices), batch_size)]


@torch.no_grad()
def text_perplexity(
    model: Any,
    ids_S: np.ndarray,
    is_label_S: np.ndarray,
    *,
    max_length: int,
    batch_size: int = 1,
    begin_with: int | None = None,
) -> dict[str, Any]:
    """Perplexity of a model on one text, by the place of a token in its window.

    Args:
        ids_S, is_label_S: tokens, and whether each is to be scored.
        max_length: tokens of a window; they do not overlap, and nothing precedes the first token of each.
        begin_with: token in front of every window, which counts among its `max_length`; its successor stays unscored.

    Returns:
        perplexity, loss (nats per token), tokens; positions, the loss by a token's place in its window, in
        intervals that double.
    """
    device = next(model.parameters()).device
    offset = 0 if begin_with is None else 1
    room = min(max_length - offset, max(len(ids_S), 1))
    # All windows, filled up on the right, where nothing before can see it.
    count = -(-len(ids_S) // room)
    ids_NT = np.full((count, offset + room), begin_with or 0, dtype=np.int64)
    wanted_NT = np.zeros(ids_NT.shape, dtype=np.bool_)
    filled = np.arange(count * room).reshape(count, room) < len(ids_S)
    ids_NT[:, offset:][filled], wanted_NT[:, offset:][filled] = ids_S, is_label_S
    wanted_NT[:, : offset + 1] = False
    sums_device = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
    total_T = torch.zeros(offset + room, dtype=torch.float64, device=sums_device)
    for start in range(0, count, batch_size):
        ids_BT, wanted_BT = (torch.from_numpy(x[start : start + batch_size]).to(device) for x in (ids_NT, wanted_NT))
        for begin, losses_BC in _losses(model, ids_BT, max(1, PIECE // len(ids_BT))):
            place = slice(begin, begin + losses_BC.shape[1])
            total_T[place] += losses_BC.masked_fill(~wanted_BT[:, place], 0.0).to(sums_device).double().sum(0)
    return _summary(total_T.cpu().numpy(), wanted_NT.sum(0))


def _losses(model: Any, ids_BT: torch.Tensor, chunk: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(place of its first token, losses [B, C] of predicting its tokens) of one piece after another."""
    tokens = ids_BT.shape[1]
    cache = DynamicCache(config=model.config.get_text_config()) if tokens - 1 > chunk else None
    for begin in range(0, tokens - 1, chunk):
        end = min(begin + chunk, tokens - 1)  # the last token predicts nothing here
        logits_BCV = model(input_ids=ids_BT[:, begin:end], use_cache=cache is not None, **{CACHE: cache}).logits
        targets_BC = ids_BT[:, begin + 1 : end + 1]
        yield begin + 1, token_losses(logits_BCV.flatten(0, 1), targets_BC.flatten()).view(targets_BC.shape)


def _summary(total_T: np.ndarray, count_T: np.ndarray) -> dict[str, Any]:
    if not count_T.any():
        raise UserError("no token to score: the text is empty, or lacks answers (try --loss-on all)")
    used = int(np.flatnonzero(count_T)[-1]) + 1
    doubling = [0, *(2**power for power in range(6, 40) if 2**power < used), used]

    def measured(start: int, end: int) -> dict[str, Any]:
        return perplexity_of(float(total_T[start:end].sum()), int(count_T[start:end].sum()))

    intervals = [(start, end) for start, end in pairwise(doubling) if count_T[start:end].any()]
    positions = [{"start": start, "end": end, **measured(start, end)} for start, end in intervals]
    return measured(0, used) | {"positions": positions}


def perplexity_of(total: float, count: int) -> dict[str, Any]:
    """`dataset_perplexity`'s result, from the summed loss in nats and the number of tokens."""
    loss = total / max(count, 1)
    return {"perplexity": math.exp(loss) if loss < 700 else math.inf, "loss": loss, "tokens": count}
