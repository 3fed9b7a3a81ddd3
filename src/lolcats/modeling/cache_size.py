"""Bytes that a sequence keeps in memory, and which exact heads, or what window of theirs, fit into a budget of them."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from lolcats.config.attention import AttentionConfig, LayerHeads
from lolcats.errors import UserError
from lolcats.modeling.configuration import LolcatsConfig
from lolcats.modeling.layer import HybridAttention
from lolcats.ops import HybridState
from lolcats.ops.eight_bits import FACTOR_BYTES
from lolcats.ops.hybrid_attention.state import initial_state

REPORTED_TOKENS = 8192
Heads = Mapping[int, Sequence[int]]  # by layer
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def cache_bytes(config: LolcatsConfig, tokens: int, dtype: torch.dtype, exact: Heads | None = None) -> int:
    """Bytes of one sequence's cache after `tokens` tokens: keys and values of exact heads, states of linear ones.

    Args:
        exact: heads, by layer, that are counted as exact beside those that are.
    """
    layers = config.layer_heads
    if exact is not None:
        layers = [replace(layer, exact=(*layer.exact, *exact.get(layer.index, ()))) for layer in layers]
    return sum(
        _kept_bytes(config, layer, tokens, dtype) + _state_bytes(layer, config.attention, dtype) for layer in layers
    )


def cache_sizes(config: LolcatsConfig, tokens: int, dtype: torch.dtype, exact: Heads | None = None) -> list[int]:
    """`cache_bytes`, and those of the base model's softmax attention in all heads."""
    base = copy.copy(config)
    base.attention = replace(config.attention, exact_window=None, cache_bits=None)
    base.layer_heads = [replace(layer, exact=tuple(range(layer.num_kv_heads))) for layer in config.layer_heads]
    return [cache_bytes(config, tokens, dtype, exact), cache_bytes(base, tokens, dtype)]


def heads_in_budget(
    config: LolcatsConfig, budget: str, dtype: torch.dtype, ranked: Sequence[tuple[int, int]] | None = None
) -> dict[int, list[int]]:
    """The KV heads, by layer, that become exact: in their order, each that still fits.

    Args:
        budget: a share of the KV heads in layers that have linear ones (12%), rounded, at least one; or the size of a
            sequence's cache at a length (24MiB@8192), in which the states of the other heads count, too.
        ranked: these heads as (layer, head); None: the first of each layer, then the second, ..., as gates spread them.
    """
    layers = {layer.index: layer for layer in config.linear_layers}
    if ranked is None:
        ranked = sorted(((i, n) for i, layer in layers.items() for n in range(layer.num_kv_heads)), key=lambda x: x[1])
    ranked = [(index, head) for index, head in ranked if head not in layers[index].exact]
    heads = sum(layer.num_kv_heads for layer in layers.values())
    if budget.endswith("%"):
        share = float(budget[:-1]) / 100
        chosen = list(ranked[: max(1, math.floor(heads * share + 0.5))]) if share > 0 else []
    else:
        amount, _, length = budget.partition("@")
        limit, tokens = _bytes(amount), int(length)
        size: float = cache_bytes(config, tokens, dtype)
        if size > limit:
            raise UserError(
                f"exact={budget}: a cache without exact heads takes {size / 2**20:.1f} MiB at {tokens} tokens already"
            )
        costs, chosen = {}, []
        for index, layer in layers.items():  # its keys, less its share of the layer's state
            keys = _kept_bytes(config, replace(layer, exact=(0,)), tokens, dtype)
            state = _state_bytes(layer, config.attention, dtype)
            costs[index] = keys - state / (layer.num_kv_heads - len(layer.exact))
        for index, head in ranked:
            if size + costs[index] <= limit:
                size += costs[index]
                chosen.append((index, head))
    if not chosen:
        raise UserError(f"exact={budget} makes none of {heads} KV heads exact; raise it")
    if len(chosen) == len(ranked):
        raise UserError(f"exact={budget} makes all {heads} KV heads exact, which is the model as it was; lower it")
    return {index: sorted(head for own, head in chosen if own == index) for index in sorted(dict(chosen))}


def window_in_budget(
    config: LolcatsConfig, attention: AttentionConfig, dtype: torch.dtype, exact: Heads | None = None
) -> int | None:
    """`attention.exact_window` in tokens: as many as keep a sequence of any length within its bytes; None: all do.

    Args:
        exact: heads, by layer, that are counted as exact beside those that are.
    """
    limit, least = _bytes(str(attention.exact_window)), max(attention.window_size, 1)
    bounded = copy.copy(config)

    def size(window: int) -> int:
        bounded.attention = replace(attention, exact_window=window)
        return cache_bytes(bounded, sys.maxsize, dtype, exact)

    smallest = size(least)
    token = size(least + 1) - smallest
    if token == 0:
        return None
    if smallest > limit:
        raise UserError(
            f"exact_window={attention.exact_window}: a sequence keeps {smallest / 2**20:.3g} MiB with the smallest"
            f" window of exact heads, window_size={least} tokens: give at least"
            f" --exact-window {math.ceil(smallest / 2**20)}MiB, or make fewer heads exact (--exact)"
        )
    return least + math.floor((limit - smallest) / token)


def _bytes(amount: str) -> float:
    """Of 16MiB; `AttentionConfig` checked how it is written."""
    return float(amount[:-3]) * UNITS[amount[-3:]]


def native_window(config: LolcatsConfig, layer: LayerHeads) -> int | None:
    """Tokens that a layer of the base model sees, if it has a sliding window."""
    kinds: Any = getattr(config.text_config, "layer_types", None)
    if kinds and kinds[layer.index] != "sliding_attention":
        return None
    return getattr(config.text_config, "sliding_window", None)


def _kept_bytes(config: LolcatsConfig, layer: LayerHeads, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values that exact heads of a layer keep."""
    most, columns, attention = native_window(config, layer), layer.head_dim, config.attention
    if most is None:
        if attention.exact_tokens is not None:
            most = attention.exact_tokens + attention.sinks
        if attention.cache_bits is not None:
            columns, dtype = columns + FACTOR_BYTES, torch.int8
    kept = tokens if most is None else min(tokens, most)
    return 2 * len(layer.exact) * columns * kept * dtype.itemsize


def _state_bytes(layer: LayerHeads, attention: AttentionConfig, dtype: torch.dtype) -> int:
    return 0 if layer.is_softmax else empty_state(layer, attention, dtype).nbytes


@cache
def empty_state(layer: LayerHeads, attention: AttentionConfig, dtype: torch.dtype) -> HybridState:
    """What the linear heads of a layer keep of one sequence, without memory."""
    module = HybridAttention(
        attention, layer.num_heads, layer.num_kv_heads, layer.head_dim, exact=layer.exact, device="meta"
    )
    keys = torch.empty(1, module.num_kv_heads, 0, layer.head_dim, dtype=dtype, device="meta")
    packed = attention.cache_bits is not None and attention.window_size > 0
    return initial_state(attention, module.params(), keys, packed=packed)
