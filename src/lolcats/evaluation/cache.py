"""Copies of a cache: many continuations start from one state."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor


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


def has_constant_state(model: Any) -> bool:
    """Whether no layer of `model` keeps keys and values of the whole past."""
    return hasattr(model, "linear_layers") and not model.softmax_layers()
