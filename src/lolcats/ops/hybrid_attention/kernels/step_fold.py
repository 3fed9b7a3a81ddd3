"""What the decoding kernel does with S and z: the block that leaves the window, and the product with the state."""

from __future__ import annotations

import triton
import triton.language as tl

from lolcats.ops.hybrid_attention.kernels.features import features, project
from lolcats.ops.hybrid_attention.kernels.tiles import (
    dot,
    load_matrix,
    load_rows,
    load_vector,
    store_matrix,
    store_vector,
)

# Entries of the largest tile of S that a program holds at once; wider states come in pieces of rows.
_PIECE = tl.constexpr(4096)
# Tokens that are folded at once: few, so that the rare fold does not cost the other steps registers and occupancy.
_ROWS = tl.constexpr(16)


@triton.jit
def project_vector(
    x_D,
    weight,
    bias,
    head,
    HAS_BIAS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    DB: tl.constexpr,
    PB: tl.constexpr,
):
    """x W + b of one float32 vector with the head's weights: [P]."""
    weight_DP = load_matrix(weight + head * D * P, 0, D, P, DB, PB).to(tl.float32)
    x_P = tl.sum(x_D[:, None] * weight_DP, 0)
    if HAS_BIAS:
        x_P += load_vector(bias + head * P, P, PB).to(tl.float32)
    return x_P


@triton.jit
def _halves(x_MP, HALF: tl.constexpr):
    """Left and right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x_MP, [x_MP.shape[0], 2, HALF]), [0, 2, 1]))


@triton.jit
def add_state(
    acc,
    q_MP,
    k_P,
    v_D,
    S,
    P: tl.constexpr,
    D: tl.constexpr,
    PB: tl.constexpr,
    DB: tl.constexpr,
    FOLD: tl.constexpr,
):
    """acc + q S, with S [P, D] in memory; with FOLD, S += k v^T comes first and is written."""
    HALF: tl.constexpr = PB // 2
    if (PB * DB > _PIECE) and (PB > 16):
        q_left_MP, q_right_MP = _halves(q_MP, HALF)
        k_left_1P, k_right_1P = _halves(k_P[None, :], HALF)
        LEFT: tl.constexpr = P if P < HALF else HALF
        acc = add_state(acc, q_left_MP, tl.sum(k_left_1P, 0), v_D, S, LEFT, D, HALF, DB, FOLD)
        if P > HALF:
            S += HALF * D
            acc = add_state(acc, q_right_MP, tl.sum(k_right_1P, 0), v_D, S, P - HALF, D, HALF, DB, FOLD)
        return acc
    else:
        S_PD = load_matrix(S, 0, P, D, PB, DB)
        if FOLD:
            S_PD += k_P[:, None] * v_D[None, :]
            tl.debug_barrier()  # all threads have read S
            store_matrix(S, S_PD, 0, P, D)
        return dot(q_MP, S_PD, acc)


@triton.jit
def _fold_piece(k_NP, v_ND, S, P: tl.constexpr, D: tl.constexpr, PB: tl.constexpr, DB: tl.constexpr):
    """S += k^T v for S [P, D] in memory, in float32."""
    HALF: tl.constexpr = PB // 2
    if (PB * DB > _PIECE) and (PB > 16):
        left_NP, right_NP = _halves(k_NP, HALF)
        LEFT: tl.constexpr = P if P < HALF else HALF
        _fold_piece(left_NP, v_ND, S, LEFT, D, HALF, DB)
        if P > HALF:
            _fold_piece(right_NP, v_ND, S + HALF * D, P - HALF, D, HALF, DB)
    else:
        S_PD = dot(tl.trans(k_NP), v_ND.to(tl.float32), load_matrix(S, 0, P, D, PB, DB))
        tl.debug_barrier()  # all threads have read S
        store_matrix(S, S_PD, 0, P, D)


@triton.jit
def fold_block(
    ring_k,
    ring_v,
    weight,
    bias,
    S,
    z,
    row,  # of S and z
    head,  # of the weights
    slot,  # where the block begins in the ring
    first,  # position of its first token
    HAS_BIAS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    MAP: tl.constexpr,
    W: tl.constexpr,
    SINKS: tl.constexpr,
    DB: tl.constexpr,
    PB: tl.constexpr,
):
    """Add a block of W tokens to S and z in memory."""
    TWO: tl.constexpr = (MAP == "hedgehog") or (MAP == "exp")
    F: tl.constexpr = 2 * P if TWO else P
    S += row.to(tl.int64) * F * D
    z += row.to(tl.int64) * F
    weight_DP = load_matrix(weight + head * D * P, 0, D, P, DB, PB).to(ring_k.dtype.element_ty)
    for begin in tl.range(0, W, _ROWS):
        k_ND = load_rows(ring_k, slot + begin, D, slot + W, 0, D, _ROWS, DB)
        v_ND = load_rows(ring_v, slot + begin, D, slot + W, 0, D, _ROWS, DB)
        plus, minus = features(project(k_ND, weight_DP, bias, head, P, PB, HAS_BIAS), MAP, P)
        offset = begin + tl.arange(0, _ROWS)
        leaves = (offset < W) & (first + offset >= SINKS)
        plus = tl.where(leaves[:, None], plus, 0.0)
        z_plus = load_vector(z, P, PB) + tl.sum(plus, 0)
        tl.debug_barrier()  # all threads have read z
        store_vector(z, z_plus, P)
        _fold_piece(plus, v_ND, S, P, D, PB, DB)
        if TWO:
            minus = tl.where(leaves[:, None], minus, 0.0)
            z_minus = load_vector(z + P, P, PB) + tl.sum(minus, 0)
            tl.debug_barrier()
            store_vector(z + P, z_minus, P)
            _fold_piece(minus, v_ND, S + P * D, P, D, PB, DB)
    tl.debug_barrier()  # the new state is read by other threads next
