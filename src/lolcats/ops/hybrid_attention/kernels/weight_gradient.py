"""Gradients of the feature maps' weights and biases: sums of x^T dx and dx over all tokens of a head.

Each program adds up a share of the tokens; the shares are added afterwards, so that results do not depend on
the order in which programs run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.constants import INTERPRETED, STATE_CHUNK
from lolcats.ops.hybrid_attention.kernels.operands import Operands, or_dummy, strides
from lolcats.ops.hybrid_attention.kernels.positions import locate
from lolcats.ops.hybrid_attention.kernels.tiles import dot, load_rows, padded, store_matrix, store_vector
from lolcats.ops.hybrid_attention.kernels.tuning import tuned

_PROGRAMS = 2 if INTERPRETED else 528  # four per multiprocessor of an H200

_CONFIGS = (
    {"warps": 4, "stages": 3},
    {"warps": 4, "stages": 5},
)
_WIDE = ({"warps": 8, "stages": 2},)


def weight_gradients(operands: Operands, x: Tensor, dx: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, G, T, D] (q or k of the operands) and dx [B, S, T, P] (contiguous; S a multiple of G): [S, D, P] and
    [S, P] in float32."""
    _, heads, tokens, columns = dx.shape
    head_dim = x.shape[3]
    chunks, tiles = operands.chunks, operands.chunk_rows * operands.chunks
    splits = max(min(triton.cdiv(_PROGRAMS, heads), tiles), 1)
    d_weight = torch.empty(splits, heads, head_dim, columns, device=x.device, dtype=torch.float32)
    d_bias = torch.empty(splits, heads, columns, device=x.device, dtype=torch.float32)
    weight_gradient_kernel(x.shape[3], x.dtype)[(heads * splits,)](
        x,
        dx,
        or_dummy(operands.length, x),
        or_dummy(operands.table, x),
        or_dummy(operands.slots, x),
        d_weight,
        d_bias,
        *strides(x),
        tokens,
        chunks,
        tiles,
        splits,
        HEADS=heads,
        REPEATS=heads // x.shape[1],
        D=head_dim,
        P=columns,
        HAS_LENGTH=operands.length is not None,
        RAGGED=operands.table is not None,
        TILE=STATE_CHUNK,
        DB=padded(head_dim),
        PB=padded(columns),
    )
    return d_weight.sum(0), d_bias.sum(0)


@tuned(_CONFIGS, _WIDE)
def weight_gradient_kernel(
    x,
    dx,
    length,
    table,
    slots,
    d_weight,
    d_bias,
    x_b,
    x_h,
    x_t,
    tokens,
    chunks,
    tiles,  # chunks of all lists
    splits,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    RAGGED: tl.constexpr,
    TILE: tl.constexpr,
    DB: tl.constexpr,
    PB: tl.constexpr,
):
    """One program: every `splits`-th tile of one head."""
    program = tl.program_id(0)
    h = program % HEADS
    split = program // HEADS
    d_weight_DP = tl.zeros([DB, PB], tl.float32)
    d_bias_P = tl.zeros([PB], tl.float32)
    for tile in tl.range(split, tiles, splits):
        slot = tile % chunks
        _, b, first_token, _, limit, first_chunk = locate(
            tl.cast(tile // chunks, tl.int64), slot, length, table, slots, tokens, HAS_LENGTH, RAGGED
        )
        first = (slot - first_chunk) * TILE
        x_head = x + b * x_b + h // REPEATS * x_h + first_token * x_t
        dx_head = dx + ((b * HEADS + h) * tokens + first_token) * P
        x_MD = load_rows(x_head, first, x_t, limit, 0, D, TILE, DB)
        dx_MP = load_rows(dx_head, first, P, limit, 0, P, TILE, PB)
        d_weight_DP = dot(tl.trans(x_MD), dx_MP, d_weight_DP)
        d_bias_P += tl.sum(dx_MP.to(tl.float32), 0)
    at = split * HEADS + h
    store_matrix(d_weight + at * D * P, d_weight_DP, 0, D, P)
    store_vector(d_bias + at * P, d_bias_P, P)
