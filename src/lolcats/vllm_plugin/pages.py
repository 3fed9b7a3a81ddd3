"""What vLLM reserves for a model: pages of one size, and which of them a sequence has at the same place.

Where layers have exact heads beside linear ones, a page holds the state of one linear head, as a block of vLLM's
attention holds one exact head's keys; elsewhere of all heads of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv, round_up

from lolcats.config.attention import LayerHeads
from lolcats.modeling import LolcatsConfig
from lolcats.modeling.cache_size import empty_state, native_window
from lolcats.ops.eight_bits import FACTOR_BYTES
from lolcats.ops.hybrid_attention.pages import page_parts
from lolcats.vllm_plugin.rings import Ring

ALIGNMENT = 128  # of states and pages, in bytes


def heads_of_rank(layer: LayerHeads, rank: int, ranks: int) -> LayerHeads:
    """The heads of a layer that one rank has. vLLM gives each rank neighbours; KV heads fewer than ranks are shared."""
    kv_heads, first = max(layer.num_kv_heads // ranks, 1), rank * layer.num_kv_heads // ranks
    exact = tuple(head - first for head in layer.exact if first <= head < first + kv_heads)
    return replace(layer, num_heads=layer.num_heads // ranks, num_kv_heads=kv_heads, exact=exact)


def state_parts(config: LolcatsConfig, layer: LayerHeads, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state of a linear head of a rank's `layer`; `dtype` is that of the model."""
    return {} if layer.is_softmax else page_parts(empty_state(layer, config.attention, dtype))


def is_bounded(config: LolcatsConfig, layer: LayerHeads) -> bool:
    """Whether exact heads of a layer keep to `exact_window`, which native windows take the place of."""
    has_window = config.attention.exact_tokens is not None and native_window(config, layer) is None
    return has_window and bool(layer.exact)


def ring_of(config: LolcatsConfig, layer: LayerHeads, dtype: torch.dtype) -> Ring | None:
    """What each bounded exact head of a rank's `layer` keeps; None: it has none."""
    if not is_bounded(config, layer):
        return None
    attention = config.attention
    packed = attention.cache_bits == 8
    columns = layer.head_dim + FACTOR_BYTES * packed
    return Ring(attention.exact_tokens or 0, attention.sinks, columns, torch.int8 if packed else dtype)


def has_pages_of_heads(config: LolcatsConfig) -> bool:
    """Whether a page holds one linear head, and not all of a layer."""
    return any(layer.exact and (not layer.is_softmax or is_bounded(config, layer)) for layer in config.layer_heads)


def states_of(config: LolcatsConfig, layer: LayerHeads, dtype: torch.dtype) -> tuple[int, int]:
    """Pages of the linear heads of a rank's `layer`, and how many bytes of each they use."""
    linear = layer.num_kv_heads - len(layer.exact)
    pages = linear if has_pages_of_heads(config) else min(linear, 1)
    head = round_up(sum(part.nbytes for part in state_parts(config, layer, dtype).values()), ALIGNMENT)
    return pages, head * linear // max(pages, 1)


def layer_pages(config: LolcatsConfig, layer: LayerHeads, dtype: torch.dtype, size: int) -> int:
    """Pages of a rank's `layer`: of its states, then those of each ring."""
    ring = ring_of(config, layer, dtype)
    return states_of(config, layer, dtype)[0] + (0 if ring is None else len(layer.exact) * ring.pages(size))


def model_pages(config: LolcatsConfig, dtype: torch.dtype, ranks: int) -> tuple[int, list[int]]:
    """The size of a page, and how many each layer has on the rank where it has most."""
    owned = [[heads_of_rank(layer, rank, ranks) for rank in range(ranks)] for layer in config.layer_heads]
    every = [own for layer in owned for own in layer]
    states = [used for own in every for pages, used in [states_of(config, own, dtype)] for _ in range(pages)]
    rings = [ring for own in every if (ring := ring_of(config, own, dtype)) for _ in own.exact]
    size = page_bytes(states, rings)
    return size, [max(layer_pages(config, own, dtype, size) for own in layer) for layer in owned]


def page_bytes(states: Sequence[int], rings: Sequence[Ring]) -> int:
    """The size of pages, of states and for rings, with which a sequence needs least memory."""
    least = round_up(max([*states, *(ring.slot_bytes for ring in rings)], default=0), ALIGNMENT)
    # Pages that some ring fills with all that it keeps, with half of it, ...
    parts = [(ring, count) for ring in set(rings) for count in range(1, 1 + ring.pages(least))]
    fitting = {round_up(cdiv(ring.slots, count) * ring.slot_bytes, ALIGNMENT) for ring, count in parts}
    sizes = [least, *sorted(size for size in fitting if size > least)]
    return min(sizes, key=lambda size: size * (len(states) + sum(ring.pages(size) for ring in rings)))


def pages_in_block(vllm_config: VllmConfig) -> int:
    """How many pages take as much as a block of vLLM's attention has of all KV heads of a layer."""
    model = vllm_config.model_config
    return model.get_num_kv_heads(vllm_config.parallel_config) if has_pages_of_heads(model.hf_config) else 1


def block_bytes(config: LolcatsConfig, dtype: torch.dtype, ranks: int) -> int:
    """The size of vLLM's blocks without padding: all pages of the largest group."""
    size, counts = model_pages(config, dtype, ranks)
    layers = [layer for layer in config.layer_heads if layer.exact and not is_bounded(config, layer)]
    heads = cdiv(sum(len(layer.exact) for layer in layers), ranks)
    keys, tables = heads if has_pages_of_heads(config) else len(layers), min(heads, 1)
    if 0 < sum(counts) <= keys / 1.5:  # then vLLM cuts keys into groups no larger than that of states
        tables = cdiv(keys, sum(counts))
        keys = cdiv(keys, tables)
    groups = group_pages([[layer] * count for layer, count in enumerate(counts) if count], keys, tables)
    return size * max(keys, *map(len, groups))


def group_pages(layers: Sequence[list[Any]], keys: int, tables: int) -> list[list[Any]]:
    """The pages of each group of states, with which a sequence of one block a group needs least memory.

    Args:
        layers: the pages of each, which all are in one group, one after the other.
        keys: pages of the largest of vLLM's groups of keys. Blocks of all groups are as large as the largest group's.
        tables: how many groups of keys there are.
    """
    rest, groups, total = list(layers), [], sum(map(len, layers))
    sizes = {count: max(keys, cdiv(total, count), *map(len, layers)) for count in range(1, 1 + len(layers))}
    for left in range(min(sizes, key=lambda count: (tables + count) * sizes[count]), 0, -1):
        found: dict[int, list[list[Any]]] = {0: []}  # by their number of pages
        for layer in rest:
            found = {own + len(layer): [*group, layer] for own, group in found.items()} | found
        share = sum(map(len, rest)) / left
        group = found[min(found, key=lambda own: abs(own - share))]
        groups.append([page for layer in group for page in layer])
        rest = [layer for layer in rest if layer not in group]
    return groups


def split_layers(layers: Sequence[list[Any]], count: int) -> list[list[Any]]:
    """`count` groups of about as many heads each, with those of a layer in one."""
    groups: list[list[Any]] = [[] for _ in range(count)]
    total, before = sum(map(len, layers)), 0
    for layer in layers:
        groups[before * count // total] += layer
        before += len(layer)
    return [group for group in groups if group]
