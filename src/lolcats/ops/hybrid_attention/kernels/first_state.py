"""What a state keeps of its sequences' first tokens beside the sums, in one launch. Importing this needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.launch import cdiv
from lolcats.ops.hybrid_attention.kernels.shape import Operands, padded, rows
from lolcats.ops.hybrid_attention.kernels.tiles import load_rows, store_rows
from lolcats.ops.hybrid_attention.state import HybridState

_ROWS = 32


def first_state(x: Operands, S: Tensor | None, z: Tensor | None) -> HybridState:
    """The state after the first T tokens of sequences that all have as many.

    S, z: sums over the tokens that left the window; None without a linear part.
    """
    batch, heads, tokens, head_dim = x.k.shape
    capacity, sinks = x.config.capacity, x.config.sinks

    def empty(count: int, dtype: torch.dtype) -> Tensor:
        return x.plan.empty((batch, heads, count, head_dim), dtype)

    nothing = empty(0, x.k.dtype)
    ring_k, ring_v = empty(capacity, x.k.dtype), empty(capacity, x.k.dtype)
    sink_k, sink_v = (empty(sinks, x.k.dtype), empty(sinks, x.k.dtype)) if sinks else (nothing, nothing)
    if S is None or z is None:
        S, z = empty(0, torch.float32), x.plan.empty((batch, heads, 0), torch.float32)
    position = x.plan.empty((batch,), torch.int64)
    x.plan.launch(
        first_state_kernel,
        (batch * heads, max(cdiv(max(capacity, sinks), _ROWS), 1)),
        rows(x.k),
        rows(x.v),
        ring_k,
        ring_v,
        sink_k,
        sink_v,
        position,
        tokens,
        heads,
        CAPACITY=capacity,
        SINKS=sinks,
        D=head_dim,
        ROWS=_ROWS,
        COLUMNS=padded(head_dim),
        num_warps=4,
    )
    return HybridState(S, z, ring_k, ring_v, sink_k, sink_v, position)


@triton.jit(do_not_specialize=["tokens", "kv_heads"])
def first_state_kernel(
    k,
    v,
    ring_k,
    ring_v,
    sink_k,
    sink_v,
    position,
    tokens,
    kv_heads,
    CAPACITY: tl.constexpr,
    SINKS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: ROWS slots of the ring and of the sinks of one key/value head."""
    row = tl.program_id(0).to(tl.int64)  # of [B * G]
    first = tl.program_id(1) * ROWS
    b, g = row // kv_heads, row % kv_heads
    k_rows, v_rows = k.x + b * k.b + g * k.h, v.x + b * v.b + g * v.h
    if CAPACITY > 0:
        slot = first + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        # The token at position p is in slot p % CAPACITY; slots that no token has are zero.
        turns = tl.maximum(tokens - 1 - slot, 0) // CAPACITY
        token = (slot + turns * CAPACITY).to(tl.int64)[:, None]
        mask = (slot < tl.minimum(tokens, CAPACITY))[:, None] & (column < D)[None, :]
        k_tile = tl.load(k_rows + token * k.t + column[None, :], mask=mask, other=0.0)
        v_tile = tl.load(v_rows + token * v.t + column[None, :], mask=mask, other=0.0)
        store_rows(ring_k + row * (CAPACITY * D), k_tile, first, D, CAPACITY, 0, D)
        store_rows(ring_v + row * (CAPACITY * D), v_tile, first, D, CAPACITY, 0, D)
    if SINKS > 0:
        k_tile = load_rows(k_rows, first, k.t, tokens, 0, D, ROWS, COLUMNS)
        v_tile = load_rows(v_rows, first, v.t, tokens, 0, D, ROWS, COLUMNS)
        store_rows(sink_k + row * (SINKS * D), k_tile, first, D, SINKS, 0, D)
        store_rows(sink_v + row * (SINKS * D), v_tile, first, D, SINKS, 0, D)
    if (first == 0) & (g == 0):
        tl.store(position + b, tokens)
