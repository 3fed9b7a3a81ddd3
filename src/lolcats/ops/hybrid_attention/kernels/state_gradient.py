"""Backward pass through the states: suffix sums of (phi_q / den)^T [dy, delta], the mirror image of the forward scan.

The state before chunk m serves the query tiles whose first window starts in chunk m. So the keys of chunk j
receive the sum over all tiles that read a state after chunk j, and the gradient of the final state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.operands import Operands, or_dummy, strides
from lolcats.ops.hybrid_attention.kernels.positions import locate
from lolcats.ops.hybrid_attention.kernels.query_gradient import QueryGradients
from lolcats.ops.hybrid_attention.kernels.scan import scan_chunks
from lolcats.ops.hybrid_attention.kernels.tiles import dot, load_rows, load_vector, padded, store_matrix, store_vector
from lolcats.ops.hybrid_attention.kernels.tuning import tuned

_CONFIGS = (
    {"BD": 64, "warps": 4, "stages": 2},
    {"BD": 64, "warps": 4, "stages": 3},
    {"BD": 128, "warps": 4, "stages": 2},
)
_WIDE = ({"BD": 64, "warps": 4, "stages": 1},)


@dataclass(frozen=True)
class StateGradients:
    """suffix_S [B, S, N, F, D] (input type) and suffix_z [B, S, N, F] (float32): what the sums receive from all
    that comes after each chunk; initial_S, initial_z: what the initial state receives, float32."""

    suffix_S: Tensor
    suffix_z: Tensor
    initial_S: Tensor
    initial_z: Tensor


def state_gradients(
    operands: Operands, queries: QueryGradients, dy: Tensor, dS: Tensor | None, dz: Tensor | None
) -> StateGradients:
    """`dS`, `dz`: gradients of the final state, or None."""
    x = operands
    shape = (x.chunk_rows, x.state_heads, x.chunks, x.features)
    S = torch.empty(*shape, x.head_dim, device=x.q.device, dtype=x.state_dtype)
    z = torch.empty(shape, device=x.q.device, dtype=torch.float32)

    def grid(meta):
        return (x.chunk_rows * x.state_heads * x.chunks * triton.cdiv(x.head_dim, meta["BD"]),)

    state_gradient_kernel(x.head_dim, x.q.dtype)[grid](
        dy,
        queries.phi,
        queries.tile_dz,
        or_dummy(x.length, x.q),
        or_dummy(x.table, x.q),
        or_dummy(x.slots, x.q),
        S,
        z,
        *strides(dy),
        x.tokens,
        x.chunks,
        FB=max(padded(x.features), 64),
        **x.constants(state_gradient_kernel),
    )
    return StateGradients(S, z, *scan_chunks(x, S, z, dS, dz, reverse=True))


@triton.jit
def first_tile(chunk, SLIDING: tl.constexpr, W: tl.constexpr, BLOCKS: tl.constexpr, C: tl.constexpr):
    """First tile of C queries that reads the state before `chunk` or a later one."""
    first = chunk * C + W - 1 if SLIDING else (tl.cdiv(chunk * C, W) + BLOCKS - 1) * W  # query
    return tl.where(chunk > 0, tl.cdiv(first, C), 0)


@tuned(_CONFIGS, _WIDE)
def state_gradient_kernel(
    dy,
    phi,
    tile_dz,
    length,
    table,
    slots,
    S,
    z,
    dy_b,
    dy_h,
    dy_t,
    tokens,
    chunks,
    HEADS: tl.constexpr,
    STATE_HEADS: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    SLIDING: tl.constexpr,
    W: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    RAGGED: tl.constexpr,
    CROWDED: tl.constexpr,
    C: tl.constexpr,
    FB: tl.constexpr,
    BD: tl.constexpr,
):
    """One program: the queries that read the state before one chunk, of all heads with this state; BD columns."""
    DBLOCKS: tl.constexpr = (D + BD - 1) // BD
    SHARING: tl.constexpr = HEADS // STATE_HEADS  # query heads of one state
    program = tl.program_id(0)
    column = program % DBLOCKS * BD
    at_chunk = (program // DBLOCKS).to(tl.int64)  # of [B * S * N]
    slot = program // DBLOCKS % chunks
    bs = program // DBLOCKS // chunks
    first_head = bs % STATE_HEADS * SHARING
    list_row = (bs // STATE_HEADS).to(tl.int64)
    _, b, first_token, _, limit, first_chunk = locate(list_row, slot, length, table, slots, tokens, HAS_LENGTH, RAGGED)
    chunk = slot - first_chunk
    if RAGGED and chunk * C >= limit:
        return
    dy += b * dy_b + first_token * dy_t

    S_FD = tl.zeros([FB, BD], tl.float32)
    z_F = tl.zeros([FB], tl.float32)
    begin = first_tile(chunk, SLIDING, W, BLOCKS, C)
    end = tl.minimum(first_tile(chunk + 1, SLIDING, W, BLOCKS, C), tl.cdiv(limit, C))
    count = tl.maximum(end - begin, 0)
    for item in tl.range(0, count * SHARING):  # tiles of queries that read the state before `chunk`
        tile = begin + item // SHARING
        h = first_head + item % SHARING
        at_head = ((b * HEADS + h) * tokens + first_token) * F
        phi_MF = load_rows(phi + at_head, tile * C, F, limit, 0, F, C, FB)
        dy_MD = load_rows(dy + h * dy_h, tile * C, dy_t, limit, column, D, C, BD)
        S_FD = dot(tl.trans(phi_MF), dy_MD, S_FD)
        z_F += load_vector(tile_dz + ((list_row * HEADS + h) * chunks + first_chunk + tile) * F, F, FB)
    store_matrix(S + at_chunk * (F * D), S_FD, column, F, D)
    if column == 0:
        store_vector(z + at_chunk * F, z_F, F)
