"""Outputs where two chunks hold all windows of a tile of queries: A, the one before it, and B, its own.

`output_kernel` rescales its accumulator with every tile of keys, so that ptxas makes each of its products wait for the
one before (its warning C7515). Here all scores are there before the first weight: nothing is rescaled, and the products
with values and states follow each other. A key that is in the window of some queries and linear for others takes one
product for both. The columns of the values come in blocks, so that few sums are in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lolcats.ops.hybrid_attention.kernels.forward_states import is_special
from lolcats.ops.hybrid_attention.kernels.launch import tuned
from lolcats.ops.hybrid_attention.kernels.shape import Operands
from lolcats.ops.hybrid_attention.kernels.tiles import (
    _FLOOR,
    _LOG2_E,
    dot,
    head_rows,
    load_matrix,
    load_rows,
    load_vector,
    load_weight,
    project,
    query_tile,
    scaled_scores,
    store_rows,
    window_start,
)

_CONFIGS = (
    {"BD": 64, "warps": 4, "stages": 2, "registers": 168},
    {"BD": 32, "warps": 4, "stages": 3, "registers": 168},
)


def is_direct(x: Operands) -> bool:
    """Whether `direct_kernel` takes this call.

    Beside `is_special` that is: terraced windows of two blocks of 64, or sliding ones of 2 to 65 (20 and 64 were
    verified on an H100); no sink logits, softcap or length cap.
    """
    shape = x.shape
    is_near = shape.WINDOW == 2 * shape.C and (shape.SLIDING or shape.W == shape.C)
    is_plain = x.sink_logits is None and x.softcap is None and x.config.linear_length_cap == 0
    return is_special(x) and is_near and is_plain


@triton.jit
def _half_features(u_MP, scale):
    """`half_features` of hedgehog times a number; exp2 has no instructions for tiny results, which exp has."""
    half = tl.exp2(u_MP * _LOG2_E - (tl.max(u_MP, 1) * _LOG2_E)[:, None])
    return half * (scale / tl.sum(half, 1))[:, None]


@triton.jit
def _linear_weights(plus_MP, minus_MP, phi, limit, shape):
    """[M, C]: features of queries times those of one chunk of keys, which lie at `phi`; zero from key `limit` on."""
    weight = dot(plus_MP, tl.trans(load_rows(phi, 0, shape.F, limit, 0, shape.P, shape.C, shape.P)))
    return dot(minus_MP, tl.trans(load_rows(phi + shape.P, 0, shape.F, limit, 0, shape.P, shape.C, shape.P)), weight)


@tuned(_CONFIGS, _CONFIGS)
def direct_kernel(
    q,
    k,
    v,
    maps,
    gamma,
    states,
    phi,  # of the keys, see `empty_features`
    layout,
    y,
    target,
    out,
    tokens,
    chunks,
    kv_heads,
    scale,  # of the scores, times log2(e)
    SAVE: tl.constexpr,
    ERROR: tl.constexpr,
    shape: tl.constexpr,
    BD: tl.constexpr,
):
    """One program: C queries of one head."""
    P: tl.constexpr = shape.P
    D: tl.constexpr = shape.D
    C: tl.constexpr = shape.C
    tile = query_tile(layout, tokens, chunks, kv_heads, shape)
    at = tile.at
    first = tile.first
    limit = at.limit
    row = first + tl.arange(0, C)
    at_row = tile.at_first + row
    y = head_rows(y, tile.h, at)
    if (shape.HAS_LENGTH or shape.RAGGED) and first >= limit:
        store_rows(y.x, tl.zeros([C, D], tl.float32), first, y.t, at.cells, 0, D)
        if ERROR:
            tl.store(out.square + at_row, tl.zeros([C], tl.float32), mask=row < at.cells)
        return
    q = head_rows(q, tile.h, at)
    k = head_rows(k, tile.g, at)
    v = head_rows(v, tile.g, at)
    start = window_start(row, shape)
    before = first - C
    end_A = tl.where(before < 0, before, first)  # the first tile has no chunk before it
    index_A = before + tl.arange(0, C)

    q_MD = load_rows(q.x, first, q.t, limit, 0, D, C, D)
    value_type: tl.constexpr = v.x.dtype.element_ty
    factor = tl.load(gamma + tile.h).to(tl.float32)
    # Weights are rounded, so gamma is before them, and what is linear takes the quotient: it cancels out, and one key's
    # output is its value exactly.
    rounded = factor.to(value_type).to(tl.float32)
    quotient = tl.where(rounded == 0.0, 1.0, rounded / factor)
    weight_A = tl.zeros([C, C], value_type)
    weight_B = tl.zeros([C, C], value_type)
    window = tl.zeros([C], tl.float32)
    top = tl.zeros([C], tl.float32)
    arg = tl.zeros([C], tl.int32)
    if first < limit:  # always: a block of its own keeps its registers apart from those of what follows
        k_A = load_rows(k.x, before, k.t, end_A, 0, D, C, D)
        k_B = load_rows(k.x, first, k.t, limit, 0, D, C, D)
        # No key of A comes after a query, and if windows are as long as a tile, none of B before a window.
        sees_A = index_A[None, :] >= start[:, None]
        sees_B = row[None, :] <= row[:, None]
        if shape.W < C:
            sees_B = sees_B & (row[None, :] >= start[:, None])
        score_A = tl.where(sees_A, scaled_scores(dot(q_MD, tl.trans(k_A)), scale, None), float("-inf"))
        score_B = tl.where(sees_B, scaled_scores(dot(q_MD, tl.trans(k_B)), scale, None), float("-inf"))
        top = tl.maximum(tl.max(score_A, 1), tl.max(score_B, 1))  # finite: a query sees its own key
        if SAVE:  # the first of the largest scores, and no key after the query's own
            arg_A = tl.min(tl.where(score_A == top[:, None], index_A[None, :], row[:, None]), 1)
            arg_B = tl.min(tl.where(score_B == top[:, None], row[None, :], row[:, None]), 1)
            arg = tl.minimum(arg_A, arg_B)
        exact_A = tl.exp2(score_A - top[:, None])
        exact_B = tl.exp2(score_B - top[:, None])
        window = tl.sum(exact_A, 1) + tl.sum(exact_B, 1)
        weight_A = (exact_A * rounded).to(value_type)
        weight_B = (exact_B * rounded).to(value_type)

    s = tile.h // (shape.REPEATS // shape.SHARES)
    chunk = tl.maximum(before, 0) // C
    at_state = (tile.list_row * kv_heads * shape.SHARES + s) * chunks + at.first_chunk + chunk
    S = states.prefix_S + at_state * (shape.F * D)
    z = states.prefix_z + at_state * shape.F
    weight_DP = load_weight(maps.q_weight, tile.h, q_MD.dtype, shape)
    u_MP = project(q_MD, weight_DP, maps.q_bias, tile.h, shape)
    plus_MP = _half_features(u_MP, quotient)
    minus_MP = _half_features(-u_MP, quotient)
    total = window * rounded + tl.sum(plus_MP * load_vector(z, P, P)[None, :], 1)
    total += tl.sum(minus_MP * load_vector(z + P, P, P)[None, :], 1)
    plus_MP = plus_MP.to(S.dtype.element_ty)
    minus_MP = minus_MP.to(S.dtype.element_ty)
    if shape.INNER:
        phi += at_state * (C * shape.F)
        linear = index_A[None, :] < start[:, None]
        weight = tl.where(linear, _linear_weights(plus_MP, minus_MP, phi, first - chunk * C, shape), 0.0)
        total += tl.sum(weight, 1)
        weight_A = tl.where(linear, weight.to(value_type), weight_A)
        if shape.W < C:
            phi += (first - chunk * C) * shape.F
            linear = row[None, :] < start[:, None]
            weight = tl.where(linear, _linear_weights(plus_MP, minus_MP, phi, limit - first, shape), 0.0)
            total += tl.sum(weight, 1)
            weight_B = tl.where(linear, weight.to(value_type), weight_B)

    inverse = tl.where(row < limit, 1.0 / tl.maximum(total, _FLOOR), 0.0)
    square = tl.zeros([C], tl.float32)
    delta = tl.zeros([C], tl.float32)
    for column in tl.range(0, D, BD):
        acc = dot(weight_A, load_rows(v.x, before, v.t, end_A, column, D, C, BD))
        acc = dot(weight_B, load_rows(v.x, first, v.t, limit, column, D, C, BD), acc)
        acc = dot(plus_MP, load_matrix(S, column, P, D, P, BD), acc)
        acc = dot(minus_MP, load_matrix(S + P * D, column, P, D, P, BD), acc)
        result = acc * inverse[:, None]
        if ERROR:
            wanted = head_rows(target, tile.h, at)
            error = result - load_rows(wanted.x, first, wanted.t, limit, column, D, C, BD).to(tl.float32)
            square += tl.sum(error * error, 1)
            delta -= tl.sum(error * result, 1)
            result = error
        store_rows(y.x, result, first, y.t, at.cells, column, D)
    if ERROR:
        tl.store(out.square + at_row, square, mask=row < at.cells)
        delta = tl.where(total >= _FLOOR, delta, 0.0)  # a clamped denominator is constant
        tl.store(out.delta + at_row, delta, mask=row < at.cells)
    if SAVE:
        tl.store(out.den + at_row, total / quotient, mask=row < limit)
        tl.store(out.arg + at_row, arg, mask=row < limit)
        tl.store(out.top + at_row, top, mask=row < limit)
