"""Backward pass, query side: one program per tile of queries of one head.

With g = dy / den and delta = -(dy . y) / den, a weight u of key i receives du = g . v_i + delta. The scores of
the window receive ds = u du, less sum_i u_i du_i at the row's maximal key, because c_n is part of the function.
The features of the query receive g S^T + delta z, and the same through the keys that no stored state holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.common import _FLOOR
from lolcats.ops.hybrid_attention.kernels.common import LOG2_E
from lolcats.ops.hybrid_attention.kernels.common import Operands
from lolcats.ops.hybrid_attention.kernels.common import dot
from lolcats.ops.hybrid_attention.kernels.common import feature_gradient
from lolcats.ops.hybrid_attention.kernels.common import features
from lolcats.ops.hybrid_attention.kernels.common import load_matrix
from lolcats.ops.hybrid_attention.kernels.common import load_rows
from lolcats.ops.hybrid_attention.kernels.common import load_vector
from lolcats.ops.hybrid_attention.kernels.common import locate
from lolcats.ops.hybrid_attention.kernels.common import or_dummy
from lolcats.ops.hybrid_attention.kernels.common import padded
from lolcats.ops.hybrid_attention.kernels.common import project
from lolcats.ops.hybrid_attention.kernels.common import store_rows
from lolcats.ops.hybrid_attention.kernels.common import strides
from lolcats.ops.hybrid_attention.kernels.common import tuned
from lolcats.ops.hybrid_attention.kernels.common import window_start
from lolcats.ops.hybrid_attention.kernels.outputs import Outputs
from lolcats.ops.hybrid_attention.kernels.outputs import query_tiles
from lolcats.ops.hybrid_attention.kernels.states import States

_CONFIGS = (
    {"BM": 64, "BN": 64, "warps": 4, "stages": 1},
    {"BM": 64, "BN": 64, "warps": 4, "stages": 2},
)
_WIDE = ({"BM": 64, "BN": 32, "warps": 4, "stages": 1},)


@dataclass(frozen=True)
class RowGradients:
    """Per query: dq [B, H, T, D] (None if not needed), dx [B, H, T, P] of the projection (None without a linear
    part), delta and total [B, H, T] in float32; total = sum_i u_i du_i / gamma, the gradient of gamma."""

    dq: Tensor | None
    dx: Tensor | None
    delta: Tensor
    total: Tensor


def query_gradients(
    operands: Operands, states: States | None, out: Outputs, dy: Tensor, *, need_inputs: bool
) -> RowGradients:
    """Gradients of the queries and of their projections, and the scalars per row that the keys need."""
    x = operands
    rows = (x.batch, x.heads, x.tokens)
    dq = torch.empty_like(x.q) if need_inputs else None
    known = out.delta is not None
    dx = None if states is None else torch.empty(*rows, x.columns, device=x.q.device, dtype=x.q.dtype)
    total = torch.empty(rows, device=x.q.device, dtype=torch.float32)
    delta = torch.empty_like(total) if out.delta is None else out.delta

    def grid(meta):
        return (x.heads * query_tiles(x, meta["BM"]),)

    query_gradient_kernel(x.head_dim, x.q.dtype)[grid](
        x.q,
        x.k,
        x.v,
        dy,
        out.y,
        or_dummy(x.q_weight, x.q),
        or_dummy(x.q_bias, x.q),
        or_dummy(x.k_weight, x.q),
        or_dummy(x.k_bias, x.q),
        x.gamma,
        x.q if states is None else states.prefix_S,
        x.q if states is None else states.prefix_z,
        or_dummy(x.sink_k, x.k),
        or_dummy(x.sink_v, x.v),
        or_dummy(x.length, x.q),
        or_dummy(x.base, x.q),
        or_dummy(x.table, x.q),
        or_dummy(x.slots, x.q),
        out.den,
        out.top,
        out.arg,
        or_dummy(dq, x.q),
        or_dummy(dx, x.q),
        delta,
        total,
        *strides(x.q),
        *strides(x.k),
        *strides(x.v),
        *strides(dy),
        *strides(out.y),
        *strides(x.sink_k),
        *strides(x.sink_v),
        *strides(dq),
        x.tokens,
        x.chunks,
        0 if x.sink_k is None else x.sink_k.shape[2],
        x.scale,
        x.scale * LOG2_E,
        NEED_INPUTS=need_inputs,
        HAS_DELTA=known,
        HAS_INITIAL=x.S is not None,
        HAS_BIAS=x.q_bias is not None,
        SB=padded(x.spec.sinks),
        **x.constants(),
    )
    return RowGradients(dq, dx, delta, total)


@triton.jit
def _score_gradient(q_MD, g_MD, k_ND, v_ND, keep, top, delta, scale_log2):
    """u du / gamma for one tile of keys: [M, N]."""
    score = dot(q_MD, tl.trans(k_ND)) * scale_log2
    weight = tl.where(keep, tl.exp2(score - top[:, None]), 0.0)
    return weight * (dot(g_MD, tl.trans(v_ND)) + delta[:, None])


@tuned(_CONFIGS, _WIDE)
def query_gradient_kernel(
    q,
    k,
    v,
    dy,
    y,
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
    den,
    top_in,
    arg_in,
    dq,
    dx,
    delta_out,
    total_out,
    q_b,
    q_h,
    q_t,
    k_b,
    k_g,
    k_t,
    v_b,
    v_g,
    v_t,
    dy_b,
    dy_h,
    dy_t,
    y_b,
    y_h,
    y_t,
    sk_b,
    sk_g,
    sk_t,
    sv_b,
    sv_g,
    sv_t,
    dq_b,
    dq_h,
    dq_t,
    tokens,
    chunks,
    sinks_there,
    scale,
    scale_log2,
    NEED_INPUTS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
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
    SB: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One program: BM queries of one head, as in `output_kernel`."""
    TWO: tl.constexpr = (MAP == "hedgehog") or (MAP == "exp")
    F: tl.constexpr = 2 * P if TWO else P
    REPEATS: tl.constexpr = HEADS // KV_HEADS
    INNER: tl.constexpr = SLIDING or (W % C != 0) or (W % BM != 0)
    tl.static_assert(BM == C or not RAGGED)
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
    dq += b * dq_b + h * dq_h + first_token * dq_t
    at_first = (b * HEADS + h) * tokens + first_token
    dx += at_first * P

    first = tile * BM
    row = first + tl.arange(0, BM)
    at = at_first + row
    if (HAS_LENGTH or RAGGED) and first >= limit:
        tl.store(total_out + at, tl.zeros([BM], tl.float32), mask=row < cells)
        if NEED_INPUTS:
            store_rows(dq, tl.zeros([BM, DB], tl.float32), first, dq_t, cells, 0, D)
        if MAP != "none":
            store_rows(dx, tl.zeros([BM, PB], tl.float32), first, P, cells, 0, P)
        return
    first_position = 0
    if HAS_BASE:
        first_position = tl.load(base + n)
    start = window_start(row, SLIDING, W, BLOCKS)
    first_start = window_start(first, SLIDING, W, BLOCKS)
    last = tl.minimum(first + BM, limit)
    real = row < limit

    q_MD = load_rows(q, first, q_t, limit, 0, D, BM, DB)
    dy_MD = load_rows(dy + b * dy_b + h * dy_h + first_token * dy_t, first, dy_t, limit, 0, D, BM, DB).to(tl.float32)
    if not HAS_DELTA:
        y_MD = load_rows(y + b * y_b + h * y_h + first_token * y_t, first, y_t, limit, 0, D, BM, DB).to(tl.float32)
    denominator = tl.load(den + at, mask=real, other=1.0)
    inverse = 1.0 / tl.maximum(denominator, _FLOOR)
    if HAS_DELTA:
        delta = tl.load(delta_out + at, mask=real, other=0.0)
    else:
        delta = -tl.sum(dy_MD * y_MD, 1) * inverse
        delta = tl.where(denominator >= _FLOOR, delta, 0.0)  # a clamped denominator is constant
        tl.store(delta_out + at, delta, mask=real)
    g_MD = (dy_MD * inverse[:, None]).to(q_MD.dtype)

    dq_MD = tl.zeros([BM, DB], tl.float32)
    total = tl.zeros([BM], tl.float32)
    if W > 0 or SINKS > 0:
        top = tl.load(top_in + at, mask=real, other=0.0)
        if SINKS > 0:
            sk = sink_k + n * sk_b + g * sk_g
            sv = sink_v + n * sv_b + g * sv_g
            sink = tl.arange(0, SB)
            sink_k_ND = load_rows(sk, tile * 0, sk_t, sinks_there, 0, D, SB, DB)
            sink_v_ND = load_rows(sv, tile * 0, sv_t, sinks_there, 0, D, SB, DB)
            sink_keep = (sink < sinks_there)[None, :] & (sink[None, :] <= first_position + row[:, None])
            sink_ds = _score_gradient(q_MD, g_MD, sink_k_ND, sink_v_ND, sink_keep, top, delta, scale_log2)
            total += tl.sum(sink_ds, 1)
            if NEED_INPUTS:
                dq_MD = dot(sink_ds.to(sink_k_ND.dtype), sink_k_ND, dq_MD)
        if W > 0:
            for key in tl.range(first_start, last, BN):
                k_ND = load_rows(k, key, k_t, limit, 0, D, BN, DB)
                v_ND = load_rows(v, key, v_t, limit, 0, D, BN, DB)
                index = key + tl.arange(0, BN)
                keep = (index[None, :] <= row[:, None]) & (index[None, :] >= start[:, None])
                if SINKS > 0:
                    keep = keep & (first_position + index >= SINKS)[None, :]
                ds = _score_gradient(q_MD, g_MD, k_ND, v_ND, keep, top, delta, scale_log2)
                total += tl.sum(ds, 1)
                if NEED_INPUTS:
                    dq_MD = dot(ds.to(k_ND.dtype), k_ND, dq_MD)
        # Rows without any linear key do not depend on gamma and c_n; their sums are zero but for rounding.
        if MAP == "none":
            total = tl.zeros([BM], tl.float32)
        elif not HAS_INITIAL:
            total = tl.where(start > SINKS, total, 0.0)
        if NEED_INPUTS:
            # The maximal key of each row: its score moves c_n, too.
            arg = tl.load(arg_in + at, mask=real, other=0)
            column = tl.arange(0, DB)[None, :]
            top_key = k + tl.maximum(arg, 0).to(tl.int64)[:, None] * k_t + column
            there = real[:, None] & (column < D)
            if SINKS > 0:
                top_sink = sink_k + n * sk_b + g * sk_g + (-1 - tl.minimum(arg, -1))[:, None] * sk_t + column
                top_key = tl.where(arg[:, None] < 0, top_sink, top_key)
            dq_MD -= total[:, None] * tl.load(top_key, mask=there, other=0.0).to(tl.float32)
            dq_MD *= tl.load(gamma + h).to(tl.float32) * scale
    tl.store(total_out + at, tl.where(real, total, 0.0), mask=row < cells)

    if MAP != "none":
        q_weight_DP = load_matrix(q_weight + h * D * P, 0, D, P, DB, PB).to(q_MD.dtype)
        x_MP = project(q_MD, q_weight_DP, q_bias, h, P, PB, HAS_BIAS)
        plus, minus = features(x_MP, MAP, P)
        chunk = first_start // C
        bs = list_row * STATE_HEADS + s
        S = prefix_S + (bs * chunks + first_chunk + chunk) * (F * D)
        z = prefix_z + (bs * chunks + first_chunk + chunk) * F
        S_PD = load_matrix(S, 0, P, D, PB, DB)
        d_plus = dot(g_MD.to(S_PD.dtype), tl.trans(S_PD)) + delta[:, None] * load_vector(z, P, PB)[None, :]
        d_minus = d_plus
        if TWO:
            S_PD = load_matrix(S + P * D, 0, P, D, PB, DB)
            d_minus = dot(g_MD.to(S_PD.dtype), tl.trans(S_PD)) + delta[:, None] * load_vector(z + P, P, PB)[None, :]
        if INNER:
            k_weight_DP = load_matrix(k_weight + s * D * P, 0, D, P, DB, PB).to(q_MD.dtype)
            for key in tl.range(chunk * C, window_start(last - 1, SLIDING, W, BLOCKS), BN):
                k_ND = load_rows(k, key, k_t, limit, 0, D, BN, DB)
                v_ND = load_rows(v, key, v_t, limit, 0, D, BN, DB)
                index = key + tl.arange(0, BN)
                k_plus, k_minus = features(project(k_ND, k_weight_DP, k_bias, s, P, PB, HAS_BIAS), MAP, P)
                keep = index[None, :] < start[:, None]
                if SINKS > 0:
                    keep = keep & (first_position + index >= SINKS)[None, :]
                d_weight = tl.where(keep, dot(g_MD, tl.trans(v_ND)) + delta[:, None], 0.0).to(k_ND.dtype)
                d_plus = dot(d_weight, k_plus.to(k_ND.dtype), d_plus)
                if TWO:
                    d_minus = dot(d_weight, k_minus.to(k_ND.dtype), d_minus)
        dx_MP = feature_gradient(x_MP, plus, minus, d_plus, d_minus, MAP, P)
        dx_MP = tl.where(real[:, None], dx_MP, 0.0)
        store_rows(dx, dx_MP, first, P, cells, 0, P)
        if NEED_INPUTS:
            dq_MD = dot(dx_MP.to(q_MD.dtype), tl.trans(q_weight_DP), dq_MD)
    if NEED_INPUTS:
        store_rows(dq, dq_MD, first, dq_t, cells, 0, D)
