"""The kernel of the outputs: one program per tile of queries of one head.

The window comes first, with a running maximum as in flash attention; c_n is the final maximum. Then the same
accumulator, times gamma, takes the linear part: the stored state before the tile's first window, and, where
the tile's queries do not share one window start, the keys between that state and each query's window.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lolcats.ops.hybrid_attention.kernels.constants import _FLOOR
from lolcats.ops.hybrid_attention.kernels.features import features, project
from lolcats.ops.hybrid_attention.kernels.positions import locate, window_start
from lolcats.ops.hybrid_attention.kernels.tiles import dot, load_matrix, load_rows, load_vector, store_rows
from lolcats.ops.hybrid_attention.kernels.tuning import tuned

_CONFIGS = (
    {"BM": 64, "BN": 64, "warps": 4, "stages": 1},
    {"BM": 64, "BN": 64, "warps": 4, "stages": 1, "registers": 168},
    {"BM": 64, "BN": 32, "warps": 4, "stages": 2, "registers": 168},
    {"BM": 64, "BN": 64, "warps": 4, "stages": 2},
)
_WIDE = ({"BM": 64, "BN": 32, "warps": 4, "stages": 1}, {"BM": 64, "BN": 32, "warps": 4, "stages": 2})


@triton.jit
def _add_keys(score, keep, index, v_ND, acc, total, top, arg, SAVE: tl.constexpr):
    """Running softmax sums after one more tile of keys; scores are in units of log 2."""
    score = tl.where(keep, score, float("-inf"))
    tile_top = tl.max(score, 1)
    if SAVE:  # the first of the largest scores
        at_top = (score == tile_top[:, None]) & keep
        tile_arg = tl.min(tl.where(at_top, index[None, :], 2147483647), 1)
        arg = tl.where(tile_top > top, tile_arg, arg)
    new_top = tl.maximum(top, tile_top)
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key yet
    fade = tl.exp2(top - finite_top)
    weight = tl.exp2(score - finite_top[:, None])
    total = total * fade + tl.sum(weight, 1)
    acc = dot(weight.to(v_ND.dtype), v_ND, acc * fade[:, None])
    return acc, total, new_top, arg


@tuned(_CONFIGS, _WIDE)
def output_kernel(
    q,
    k,
    v,
    q_weight,
    q_bias,
    k_weight,
    k_bias,
    gamma,
    prefix_S,
    prefix_z,
    sink_k,
    sink_v,
    length,
    base,
    table,
    slots,
    y,
    den,
    top_out,
    arg_out,
    target,
    delta_out,
    square_out,
    q_b,
    q_h,
    q_t,
    k_b,
    k_g,
    k_t,
    v_b,
    v_g,
    v_t,
    sk_b,
    sk_g,
    sk_t,
    sv_b,
    sv_g,
    sv_t,
    y_b,
    y_h,
    y_t,
    t_b,
    t_h,
    t_t,
    tokens,
    chunks,
    sinks_there,
    scale,  # of the scores, times log2(e)
    SAVE: tl.constexpr,
    ERROR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    STATE_HEADS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    MAP: tl.constexpr,
    SLIDING: tl.constexpr,
    INNER: tl.constexpr,
    W: tl.constexpr,
    BLOCKS: tl.constexpr,
    SINKS: tl.constexpr,
    HORIZON: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    HAS_BASE: tl.constexpr,
    RAGGED: tl.constexpr,
    CROWDED: tl.constexpr,
    C: tl.constexpr,
    DB: tl.constexpr,
    PB: tl.constexpr,
    SB: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One program: BM queries of one head. Heads that share keys run next to each other."""
    TWO: tl.constexpr = (MAP == "hedgehog") or (MAP == "exp")
    F: tl.constexpr = 2 * P if TWO else P
    REPEATS: tl.constexpr = HEADS // KV_HEADS
    tl.static_assert(BM == C or (C % BM == 0 and not RAGGED))
    tiles = chunks if RAGGED else tl.cdiv(tokens, BM)
    program = tl.program_id(0)
    slot = program // REPEATS % tiles
    bg = program // REPEATS // tiles
    list_row = (bg // KV_HEADS).to(tl.int64)
    g = bg % KV_HEADS
    h = g * REPEATS + program % REPEATS
    s = h // (HEADS // STATE_HEADS)
    n, b, first_token, cells, limit, first_chunk = locate(
        list_row, slot, length, table, slots, tokens, HAS_LENGTH, RAGGED
    )
    tile = slot - first_chunk
    q += b * q_b + h * q_h + first_token * q_t
    k += b * k_b + g * k_g + first_token * k_t
    v += b * v_b + g * v_g + first_token * v_t
    y += b * y_b + h * y_h + first_token * y_t
    bs = list_row * STATE_HEADS + s

    first = tile * BM
    row = first + tl.arange(0, BM)
    at_first = (b * HEADS + h) * tokens + first_token
    if (HAS_LENGTH or RAGGED) and first >= limit:
        store_rows(y, tl.zeros([BM, DB], tl.float32), first, y_t, cells, 0, D)
        if ERROR:
            tl.store(square_out + at_first + row, tl.zeros([BM], tl.float32), mask=row < cells)
        return
    first_position = 0
    if HAS_BASE:
        first_position = tl.load(base + n)
    start = window_start(row, SLIDING, W, BLOCKS)
    first_start = window_start(first, SLIDING, W, BLOCKS)
    last = tl.minimum(first + BM, limit)

    q_MD = load_rows(q, first, q_t, limit, 0, D, BM, DB)
    acc = tl.zeros([BM, DB], tl.float32)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    arg = tl.zeros([BM], tl.int32)

    if SINKS > 0:
        sink = tl.arange(0, SB)
        sk = sink_k + n * sk_b + g * sk_g
        sv = sink_v + n * sv_b + g * sv_g
        sink_k_ND = load_rows(sk, tile * 0, sk_t, sinks_there, 0, D, SB, DB)
        sink_v_ND = load_rows(sv, tile * 0, sv_t, sinks_there, 0, D, SB, DB)
        sink_keep = (sink < sinks_there)[None, :] & (sink[None, :] <= first_position + row[:, None])
        sink_score = dot(q_MD, tl.trans(sink_k_ND)) * scale
        acc, total, top, arg = _add_keys(sink_score, sink_keep, -1 - sink, sink_v_ND, acc, total, top, arg, SAVE)
    if W > 0:
        for key in tl.range(first_start, last, BN):
            k_ND = load_rows(k, key, k_t, limit, 0, D, BN, DB)
            v_ND = load_rows(v, key, v_t, limit, 0, D, BN, DB)
            index = key + tl.arange(0, BN)
            keep = (index[None, :] <= row[:, None]) & (index[None, :] >= start[:, None])
            if SINKS > 0:
                keep = keep & (first_position + index >= SINKS)[None, :]
            score = dot(q_MD, tl.trans(k_ND)) * scale
            acc, total, top, arg = _add_keys(score, keep, index, v_ND, acc, total, top, arg, SAVE)
    if W > 0 or SINKS > 0:
        factor = tl.load(gamma + h).to(tl.float32)
        if HORIZON > 0:
            factor = factor * tl.maximum((first_position + row + 1).to(tl.float32) / HORIZON, 1.0)
            acc = acc * factor[:, None]
        else:
            acc = acc * factor
        total = total * factor

    if MAP != "none":
        weight_DP = load_matrix(q_weight + h * D * P, 0, D, P, DB, PB).to(q_MD.dtype)
        q_plus, q_minus = features(project(q_MD, weight_DP, q_bias, h, P, PB, HAS_BIAS), MAP, P)
        chunk = first_start // C
        S = prefix_S + (bs * chunks + first_chunk + chunk) * (F * D)
        z = prefix_z + (bs * chunks + first_chunk + chunk) * F
        S_PD = load_matrix(S, 0, P, D, PB, DB)
        acc = dot(q_plus.to(S_PD.dtype), S_PD, acc)
        total += tl.sum(q_plus * load_vector(z, P, PB)[None, :], 1)
        if TWO:
            S_PD = load_matrix(S + P * D, 0, P, D, PB, DB)
            acc = dot(q_minus.to(S_PD.dtype), S_PD, acc)
            total += tl.sum(q_minus * load_vector(z + P, P, PB)[None, :], 1)
        if INNER:
            weight_DP = load_matrix(k_weight + s * D * P, 0, D, P, DB, PB).to(k.dtype.element_ty)
            for key in tl.range(chunk * C, window_start(last - 1, SLIDING, W, BLOCKS), BN):
                k_ND = load_rows(k, key, k_t, limit, 0, D, BN, DB)
                v_ND = load_rows(v, key, v_t, limit, 0, D, BN, DB)
                index = key + tl.arange(0, BN)
                k_plus, k_minus = features(project(k_ND, weight_DP, k_bias, s, P, PB, HAS_BIAS), MAP, P)
                weight = dot(q_plus.to(k_ND.dtype), tl.trans(k_plus.to(k_ND.dtype)))
                if TWO:
                    weight = dot(q_minus.to(k_ND.dtype), tl.trans(k_minus.to(k_ND.dtype)), weight)
                keep = index[None, :] < start[:, None]
                if SINKS > 0:
                    keep = keep & (first_position + index >= SINKS)[None, :]
                weight = tl.where(keep, weight, 0.0)
                total += tl.sum(weight, 1)
                acc = dot(weight.to(v_ND.dtype), v_ND, acc)

    inverse = 1.0 / tl.maximum(total, _FLOOR)
    out = acc * inverse[:, None]
    out = tl.where((row < limit)[:, None], out, 0.0)
    at = at_first + row
    if ERROR:
        target += b * t_b + h * t_h + first_token * t_t
        error = out - load_rows(target, first, t_t, limit, 0, D, BM, DB).to(tl.float32)
        tl.store(square_out + at, tl.sum(error * error, 1), mask=row < cells)
        delta = tl.where(total >= _FLOOR, -tl.sum(error * out, 1), 0.0)  # a clamped denominator is constant
        tl.store(delta_out + at, delta, mask=row < cells)
        out = error
    store_rows(y, out, first, y_t, cells, 0, D)
    if SAVE:
        tl.store(den + at, total, mask=row < limit)
        tl.store(arg_out + at, arg, mask=row < limit)
        tl.store(top_out + at, top, mask=row < limit)
