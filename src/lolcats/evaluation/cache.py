"""Copies of a cache: many continuations start from one state."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


def new_cache(model: Any) -> Any:
    """An empty cache for `model`; linearized layers put their states in place of the empty layers."""
    return DynamicCache(config=model.config.get_text_config())


def fork(cache: Any, rows: Tensor) -> Any:
    """A cache whose row i is row `rows[i]` of `cache`, which stays as it is.

    Works for key/value layers and for linear states alike: both replace their tensors when rows are picked.

    Args:
        rows: [N] int64 on any device; rows may repeat.
    """
    forked = copy.copy(cache)
    forked.layers = [copy.copy(layer) for layer in cache.layers]
    forked.batch_select_indices(rows)
    return forked


@torch.no_grad()
def prefill(model: Any, ids_BT: Tensor, *, mask_BT: Tensor | None = None, chunk: int = 2048) -> tuple[Tensor, Any]:
    """Feed prompts in pieces, so that activations need memory for `chunk` tokens only.

    Args:
        ids_BT: token ids, padded on the left.
        mask_BT: 0 for padding; None: no padding.

    Returns:
        Logits after the last token [B, V], and the cache.
    """
    cache = new_cache(model)
    positions_BT = None if mask_BT is None else (mask_BT.cumsum(1) - 1).clamp_min(0)
    logits = torch.empty(0)
    for begin in range(0, ids_BT.shape[1], chunk):
        end = min(begin + chunk, ids_BT.shape[1])
        extra: dict[str, Any] = {}
        if mask_BT is not None and positions_BT is not None:
            extra = {"attention_mask": mask_BT[:, :end], "position_ids": positions_BT[:, begin:end]}
        output = model(input_ids=ids_BT[:, begin:end], past_key_values=cache, use_cache=True, logits_to_keep=1, **extra)
        logits = output.logits[:, -1]
    return logits, cache


def has_constant_state(model: Any) -> bool:
    """Whether no layer of `model` keeps keys and values of the whole past."""
    return hasattr(model, "linear_layers") and not model.softmax_layers()
