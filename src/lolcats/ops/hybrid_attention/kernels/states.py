"""States before every chunk: prefix sums of phi_k(k)^T [v, 1] over the sequence.

One launch writes the sum of every chunk, all at once; a second one adds them up along the sequence. The sums
lie in memory in the input type: in float32 they would cost more traffic than q, k, v and y together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.features import features, project
from lolcats.ops.hybrid_attention.kernels.operands import Operands, or_dummy, strides
from lolcats.ops.hybrid_attention.kernels.positions import locate, window_start
from lolcats.ops.hybrid_attention.kernels.scan import scan_chunks
from lolcats.ops.hybrid_attention.kernels.tiles import dot, load_matrix, load_rows, store_matrix, store_vector
from lolcats.ops.hybrid_attention.kernels.tuning import tuned

_CONFIGS = (
    {"BD": 64, "warps": 4, "stages": 1},
    {"BD": 128, "warps": 4, "stages": 1},
    {"BD": 32, "warps": 4, "stages": 1},
)
_WIDE = ({"BD": 64, "warps": 4, "stages": 1},)


@dataclass(frozen=True)
class States:
    """prefix_S [B, S, N, F, D] (input type) and prefix_z [B, S, N, F] (float32), the state before each of
    the N chunks (in a ragged batch B = 1, and chunks without a token hold zero); final_S [sequences, S, F, D] and
    final_z [sequences, S, F], float32, after all keys that left the window."""

    prefix_S: Tensor
    prefix_z: Tensor
    final_S: Tensor
    final_z: Tensor


def chunk_states(operands: Operands) -> States:
    """The states before every chunk, and after all keys that have left the window."""
    x = operands
    assert x.k_weight is not None
    shape = (x.chunk_rows, x.state_heads, x.chunks, x.features)
    S = torch.empty(*shape, x.head_dim, device=x.k.device, dtype=x.state_dtype)
    z = torch.empty(shape, device=x.k.device, dtype=torch.float32)

    def grid(meta):
        return (x.chunk_rows * x.state_heads * x.chunks * triton.cdiv(x.head_dim, meta["BD"]),)

    state_kernel(x.head_dim, x.q.dtype)[grid](
        x.k,
        x.v,
        x.k_weight,
        or_dummy(x.k_bias, x.k),
        *x.layout,
        S,
        z,
        *strides(x.k),
        *strides(x.v),
        x.tokens,
        x.chunks,
        **x.constants(state_kernel),
    )
    return States(S, z, *scan_chunks(x, S, z, x.S, x.z, reverse=False))


@tuned(_CONFIGS, _WIDE)
def state_kernel(
    k,
    v,
    weight,
    bias,
    length,
    base,
    table,
    slots,
    S,
    z,
    k_b,
    k_g,
    k_t,
    v_b,
    v_g,
    v_t,
    tokens,
    chunks,
    HAS_BIAS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    STATE_HEADS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    MAP: tl.constexpr,
    SLIDING: tl.constexpr,
    W: tl.constexpr,
    BLOCKS: tl.constexpr,
    SINKS: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    HAS_BASE: tl.constexpr,
    RAGGED: tl.constexpr,
    CROWDED: tl.constexpr,
    C: tl.constexpr,
    DB: tl.constexpr,
    PB: tl.constexpr,
    BD: tl.constexpr,
):
    """One program: one chunk of one state head, BD columns of v."""
    TWO: tl.constexpr = (MAP == "hedgehog") or (MAP == "exp")
    F: tl.constexpr = 2 * P if TWO else P
    DBLOCKS: tl.constexpr = (D + BD - 1) // BD
    program = tl.program_id(0)
    column = program % DBLOCKS * BD
    at = (program // DBLOCKS).to(tl.int64)  # of [B * S * N]
    slot = program // DBLOCKS % chunks
    row = program // DBLOCKS // chunks  # of [B * S]
    head = row % STATE_HEADS
    g = head // (STATE_HEADS // KV_HEADS)
    S += at * (F * D)
    z += at * F

    n, b, first_token, _, limit, first_chunk = locate(
        (row // STATE_HEADS).to(tl.int64), slot, length, table, slots, tokens, HAS_LENGTH, RAGGED
    )
    chunk = slot - first_chunk
    if RAGGED and chunk * C >= limit:  # nobody reads these states, but they are in an operator's output
        for half in tl.static_range(F // P):
            store_matrix(S + half * P * D, tl.zeros([PB, BD], tl.float32), column, P, D)
            if column == 0:
                store_vector(z + half * P, tl.zeros([PB], tl.float32), P)
        return
    first_position = 0
    if HAS_BASE:
        first_position = tl.load(base + n)
    k += b * k_b + g * k_g + first_token * k_t
    v += b * v_b + g * v_g + first_token * v_t
    # Keys from `end` on are in some window at the end of the sequence; no query sees them linearly.
    end = window_start(limit - 1, SLIDING, W, BLOCKS)
    entry = chunk * C + tl.arange(0, C)
    keep = entry < end
    if SINKS > 0:
        keep = keep & (first_position + entry >= SINKS)

    k_CD = load_rows(k, chunk * C, k_t, end, 0, D, C, DB)
    v_CD = load_rows(v, chunk * C, v_t, end, column, D, C, BD)
    weight_DP = load_matrix(weight + head * D * P, 0, D, P, DB, PB).to(k.dtype.element_ty)
    plus, minus = features(project(k_CD, weight_DP, bias, head, P, PB, HAS_BIAS), MAP, P)
    plus = tl.where(keep[:, None], plus, 0.0)
    store_matrix(S, dot(tl.trans(plus.to(v_CD.dtype)), v_CD), column, P, D)
    if column == 0:
        store_vector(z, tl.sum(plus, 0), P)
    if TWO:
        minus = tl.where(keep[:, None], minus, 0.0)
        store_matrix(S + P * D, dot(tl.trans(minus.to(v_CD.dtype)), v_CD), column, P, D)
        if column == 0:
            store_vector(z + P, tl.sum(minus, 0), P)
