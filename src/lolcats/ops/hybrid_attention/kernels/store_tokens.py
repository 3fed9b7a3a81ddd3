"""New keys and values into their places in a cache, packed into 8 bits if it keeps these, in one launch; or into dense
rows as attention reads them, rounded likewise, between those that the cache has.

A decoding step takes some twenty small launches for it otherwise, a prefill a hundred. Importing it needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.eight_bits import FACTOR_BYTES, is_packed
from lolcats.ops.hybrid_attention.kernels.operands import (
    NO_ROWS,
    Rows,
    cdiv,
    launch,
    next_power_of_2,
    rows,
    token_rows,
)
from lolcats.ops.hybrid_attention.kernels.tiles import factor_of, levels_of

FEW = 1024  # rows times heads; below, each has a program of its own


class Moves(NamedTuple):
    """Int64 tensors [R], or None for 0, 1, ...

    source: the new token of each row; negative: there is none, see `move_tokens`.
    slot, place: the row's place in the cache. Places behind the ring are those of the sinks.
    page_2N: a pair of [N], the slots where each of N sequences is read and written; `slot` is its number then.
    """

    source: Any
    slot: Any
    place: Any
    page_2N: Any = None


class Cache(NamedTuple):
    """Where tokens are kept, as kernels take it.

    Attributes:
        rows: of keys and values [slots, G, C, E], in a floating type with E = D, or int8 with a factor's four bytes
            behind the D entries; then likewise of sinks, of places behind C, or of None.
        heads, capacity, width: G, C, D.
    """

    rows: tuple[Rows, ...]
    heads: int
    capacity: int
    width: int
    packed: bool

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, sinks: Sequence[Tensor | None] = (None, None)) -> Cache:
        _, heads, capacity, width = keys.shape
        packed = is_packed(keys)
        return cls(tuple(map(rows, (keys, values, *sinks))), heads, capacity, width - FACTOR_BYTES * packed, packed)


def store_tokens(
    k_BG1D: Tensor, v_BG1D: Tensor, keys_SGCE: Tensor, values_SGCE: Tensor, slot_B: Tensor, place_B: Tensor
) -> None:
    """keys[slot, :, place] = k, values[slot, :, place] = v for each of B tokens; rounded if the cache has 8 bits."""
    new = [token_rows(x.squeeze(2)) for x in (k_BG1D, v_BG1D)]
    move_tokens(new, Cache.of(keys_SGCE, values_SGCE), Moves(None, slot_B, place_B))


def move_tokens(
    new: Sequence[Rows],
    cache: Cache,
    moves: Moves,
    *,
    dense: Sequence[Rows] = (NO_ROWS, NO_ROWS),
    heads_G: Tensor | None = None,
    launch: Any = launch,
) -> None:
    """One token a row: keys[slot, :, place] = k, values[slot, :, place] = v, or what `eight_bits.pack` makes of them.

    Args:
        new: keys and values [1, G, T, D]; `NO_ROWS`: no token is written; what stays is copied from the slots read,
            before new ones replace it.
        moves: of R rows; of several to one place any stays. Without a token zeros are written (-1), or nothing (-2).
        dense: [1, G, R, D] each; is written instead of the cache, with what keys and values are after packing. Rows
            without a token get what the cache has at their place.
        heads_G: int64, the heads of k and v that the cache has; None: all.
    """
    count = (moves.slot if moves.source is None else moves.source).shape[0]
    block = 1 if count * cache.heads < FEW else 16
    if count == 0:
        return
    with torch.cuda.device_of(cache.rows[0].x):
        launch(
            _kernel,
            (cdiv(count, block) * cache.heads,),
            tuple(new),
            cache.rows,
            tuple(dense),
            moves,
            heads_G,
            count,
            cache.heads,
            cache.capacity,
            D=cache.width,
            BLOCK=next_power_of_2(cache.width),
            ROWS=block,
            PACKED=cache.packed,
            num_warps=1 if block == 1 else 4,
        )


@triton.jit
def _address(x, b, h, t):
    """Of rows in a tensor [B, H, T, D], as [R, 1]."""
    return (x.x + b * x.b + h * x.h + t * x.t)[:, None]


@triton.jit(do_not_specialize=["count", "heads", "capacity"])
def _kernel(
    new,
    cache,
    dense,
    moves,
    heads_table,
    count,
    heads,
    capacity,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One program: the keys and values of some rows in one head."""
    g = (tl.program_id(0) % heads).to(tl.int64)
    row = (tl.program_id(0) // heads * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = row < count
    source, slot, place, head = row, row, row, g
    if moves.source is not None:
        source = tl.load(moves.source + row, mask=there, other=-2)
    if moves.slot is not None:
        slot = tl.load(moves.slot + row, mask=there, other=0)
        place = tl.load(moves.place + row, mask=there, other=0)
    origin = slot
    if moves.page_2N is not None:
        origin = tl.load(moves.page_2N[0] + slot, mask=there, other=0).to(tl.int64)
        slot = tl.load(moves.page_2N[1] + slot, mask=there, other=0).to(tl.int64)
    if heads_table is not None:
        head = tl.load(heads_table + g)
    column = tl.arange(0, BLOCK)[None, :]
    real = there[:, None] & (column < D)
    for i in tl.static_range(2):
        taken = real & (source >= 0)[:, None]
        x = tl.zeros([ROWS, BLOCK], tl.float32)
        if new[i].x is not None:
            x = tl.load(_address(new[i], 0, head, source) + column, mask=taken, other=0.0).to(tl.float32)
        factor = tl.full([ROWS, 1], 1.0, tl.float32)
        if PACKED:
            factor = factor_of(x, 1)[:, None]
            x = levels_of(x, factor)
        near = x * factor
        for part in tl.static_range(2):  # ring, sinks
            if cache[2 * part + i].x is not None:
                old = _address(cache[2 * part + i], origin, g, place - part * capacity)
                inside = there[:, None] & ((place >= capacity)[:, None] == (part == 1))
                old_factor = (old + D).to(tl.pointer_type(tl.float32), bitcast=True)
                if dense[0].x is not None:
                    reads = inside & (source < 0)[:, None]
                    found = tl.load(old + column, mask=reads & (column < D), other=0.0).to(tl.float32)
                    if PACKED:
                        found *= tl.load(old_factor, mask=reads, other=0.0)
                    near += found
                else:
                    at = _address(cache[2 * part + i], slot, g, place - part * capacity)
                    at_factor = (at + D).to(tl.pointer_type(tl.float32), bitcast=True)
                    writes = inside & (source >= -1)[:, None]
                    if new[i].x is None:
                        writes = inside & ((source < -1) & (origin != slot))[:, None]
                        x = tl.load(old + column, mask=writes & (column < D), other=0.0).to(tl.float32)
                        if PACKED:
                            factor = tl.load(old_factor, mask=writes, other=0.0)
                    tl.store(at + column, x.to(at.dtype.element_ty), mask=writes & (column < D))
                    if PACKED:
                        tl.store(at_factor, factor, mask=writes)
        if dense[0].x is not None:
            at = _address(dense[i], 0, g, row)
            tl.store(at + column, near.to(at.dtype.element_ty), mask=real)
