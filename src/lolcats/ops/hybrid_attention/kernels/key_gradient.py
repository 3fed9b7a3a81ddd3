"""Backward pass, key side: one program per chunk of keys of one key/value head, all its query heads in turn.

A key receives gradients from the queries that see it in their windows, from those that see it linearly but
whose tile starts from an earlier state (`inner`), and through the states from all later ones.
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
from lolcats.ops.hybrid_attention.kernels.common import project
from lolcats.ops.hybrid_attention.kernels.common import store_rows
from lolcats.ops.hybrid_attention.kernels.common import strides
from lolcats.ops.hybrid_attention.kernels.common import tuned
from lolcats.ops.hybrid_attention.kernels.common import window_start
from lolcats.ops.hybrid_attention.kernels.outputs import Outputs
from lolcats.ops.hybrid_attention.kernels.query_gradient import RowGradients
from lolcats.ops.hybrid_attention.kernels.state_gradient import StateGradients
from lolcats.ops.hybrid_attention.kernels.state_gradient import first_tile

_CONFIGS = ({"warps": 4, "stages": 2}, {"warps": 4, "stages": 1})
_WIDE = ({"warps": 4, "stages": 1},)


@dataclass(frozen=True)
class KeyGradients:
    """dk, dv [B, G, T, D] (None if not needed); dx [B, S, T, P] of the projection (None without a linear part)."""

    dk: Tensor | None
    dv: Tensor | None
    dx: Tensor | None


def key_gradients(
    operands: Operands,
    out: Outputs,
    rows: RowGradients,
    states: StateGradients | None,
    dy: Tensor,
    *,
    need_inputs: bool,
) -> KeyGradients:
    """Gradients of keys, values and the keys' projections."""
    x = operands
    dk = torch.empty_like(x.k) if need_inputs else None
    dv = torch.empty_like(x.v) if need_inputs else None
    dx = None
    if states is not None:
        dx = torch.empty(x.batch, x.state_heads, x.tokens, x.columns, device=x.k.device, dtype=x.k.dtype)
    key_gradient_kernel(x.head_dim, x.q.dtype)[(x.chunk_rows * x.kv_heads * x.chunks,)](
        x.q,
        x.k,
        x.v,
        dy,
        or_dummy(x.q_weight, x.q),
        or_dummy(x.q_bias, x.q),
        or_dummy(x.k_weight, x.q),
        or_dummy(x.k_bias, x.q),
        x.gamma,
        x.q if states is None else states.suffix_S,
        x.q if states is None else states.suffix_z,
        or_dummy(x.length, x.q),
        or_dummy(x.base, x.q),
        or_dummy(x.table, x.q),
        or_dummy(x.slots, x.q),
        out.den,
        out.top,
        out.arg,
        rows.delta,
        rows.total,
        or_dummy(dk, x.k),
        or_dummy(dv, x.v),
        or_dummy(dx, x.k),
        *strides(x.q),
        *strides(x.k),
        *strides(x.v),
        *strides(dy),
        *strides(dk),
        *strides(dv),
        x.tokens,
        x.chunks,
        x.scale,
        x.scale * LOG2_E,
        NEED_INPUTS=need_inputs,
        HAS_BIAS=x.q_bias is not None,
        **x.constants(),
    )
    return KeyGradients(dk, dv, dx)


@triton.jit
def load_queries(q, dy, den, delta, first, q_t, dy_t, limit, D: tl.constexpr, BM: tl.constexpr, DB: tl.constexpr):
    """q and g = dy / den [M, D] in q's type, and delta [M], of one tile; zero where there is no token."""
    row = first + tl.arange(0, BM)
    q_MD = load_rows(q, first, q_t, limit, 0, D, BM, DB)
    dy_MD = load_rows(dy, first, dy_t, limit, 0, D, BM, DB)
    inverse = 1.0 / tl.maximum(tl.load(den + row, mask=row < limit, other=1.0), _FLOOR)
    g_MD = (dy_MD.to(tl.float32) * inverse[:, None]).to(q_MD.dtype)
    return q_MD, g_MD, tl.load(delta + row, mask=row < limit, other=0.0)


@tuned(_CONFIGS, _WIDE)
def key_gradient_kernel(
    q,
    k,
    v,
    dy,
    q_weight,
    q_bias,
    k_weight,
    k_bias,
    gamma,
    suffix_S,
    suffix_z,
    length,
    base,
    table,
    slots,
    den,
    top,
    arg,
    delta,
    total,
    dk,
    dv,
    dx,
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
    dk_b,
    dk_g,
    dk_t,
    dv_b,
    dv_g,
    dv_t,
    tokens,
    chunks,
    scale,
    scale_log2,
    NEED_INPUTS: tl.constexpr,
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
):
    """One program: C keys of one key/value head. Tiles are [keys, queries]."""
    TWO: tl.constexpr = (MAP == "hedgehog") or (MAP == "exp")
    F: tl.constexpr = 2 * P if TWO else P
    REPEATS: tl.constexpr = HEADS // KV_HEADS
    SHARING: tl.constexpr = HEADS // STATE_HEADS
    INNER: tl.constexpr = SLIDING or (W % C != 0)
    program = tl.program_id(0)
    slot = program % chunks
    bg = program // chunks
    list_row = (bg // KV_HEADS).to(tl.int64)
    g = bg % KV_HEADS
    n, b, first_token, cells, limit, first_chunk = locate(
        list_row, slot, length, table, slots, tokens, HAS_LENGTH, RAGGED
    )
    chunk = slot - first_chunk
    q += b * q_b + first_token * q_t
    dy += b * dy_b + first_token * dy_t
    dk += b * dk_b + g * dk_g + first_token * dk_t
    dv += b * dv_b + g * dv_g + first_token * dv_t
    dx += first_token * P

    first = chunk * C
    index = first + tl.arange(0, C)
    if (HAS_LENGTH or RAGGED) and first >= limit:
        if NEED_INPUTS:
            store_rows(dk, tl.zeros([C, DB], tl.float32), first, dk_t, cells, 0, D)
            store_rows(dv, tl.zeros([C, DB], tl.float32), first, dv_t, cells, 0, D)
        if MAP != "none":
            for own in tl.range(0, STATE_HEADS // KV_HEADS):
                at_head = (b * STATE_HEADS + g * (STATE_HEADS // KV_HEADS) + own) * tokens * P
                store_rows(dx + at_head, tl.zeros([C, PB], tl.float32), first, P, cells, 0, P)
        return
    first_position = 0
    if HAS_BASE:
        first_position = tl.load(base + n)
    is_sink = first_position + index < SINKS

    k_ND = load_rows(k + b * k_b + g * k_g + first_token * k_t, first, k_t, limit, 0, D, C, DB)
    v_ND = load_rows(v + b * v_b + g * v_g + first_token * v_t, first, v_t, limit, 0, D, C, DB)
    dk_ND = tl.zeros([C, DB], tl.float32)
    dv_ND = tl.zeros([C, DB], tl.float32)

    if NEED_INPUTS and W > 0:
        # Queries from the key itself to the last one whose window holds the chunk's last key.
        last_key = tl.minimum(first + C, limit) - 1
        end = last_key + W if SLIDING else (last_key // W + BLOCKS) * W
        count = tl.cdiv(tl.minimum(end, limit) - first, C)
        for item in tl.range(0, count * REPEATS):
            h = g * REPEATS + item % REPEATS
            begin = first + item // REPEATS * C
            row = begin + tl.arange(0, C)
            at = (b * HEADS + h) * tokens + first_token
            q_MD, g_MD, delta_M = load_queries(
                q + h * q_h, dy + h * dy_h, den + at, delta + at, begin, q_t, dy_t, limit, D, C, DB
            )
            real = row < limit
            top_M = tl.load(top + at + row, mask=real, other=0.0)
            arg_M = tl.load(arg + at + row, mask=real, other=0)
            total_M = tl.load(total + at + row, mask=real, other=0.0)
            factor = tl.load(gamma + h).to(tl.float32)
            keep = (index[:, None] <= row[None, :]) & real[None, :]
            keep = keep & (index[:, None] >= window_start(row, SLIDING, W, BLOCKS)[None, :])
            if SINKS > 0:
                keep = keep & (is_sink == 0)[:, None]
            score_NM = dot(k_ND, tl.trans(q_MD)) * scale_log2
            weight_NM = tl.where(keep, factor * tl.exp2(score_NM - top_M[None, :]), 0.0)
            dv_ND = dot(weight_NM.to(g_MD.dtype), g_MD, dv_ND)
            ds_NM = weight_NM * (dot(v_ND, tl.trans(g_MD)) + delta_M[None, :])
            ds_NM -= tl.where(index[:, None] == arg_M[None, :], (factor * total_M)[None, :], 0.0)
            dk_ND = dot(ds_NM.to(q_MD.dtype), q_MD, dk_ND)
        dk_ND *= scale

    if MAP != "none":
        # Sinks, and keys that are still in the last window, are in no sum.
        end_key = window_start(limit - 1, SLIDING, W, BLOCKS)
        is_linear = (index < end_key) & (is_sink == 0)
        for own in tl.range(0, STATE_HEADS // KV_HEADS):
            s = g * (STATE_HEADS // KV_HEADS) + own
            at_state = (list_row * STATE_HEADS + s) * chunks + slot
            k_weight_DP = load_matrix(k_weight + s * D * P, 0, D, P, DB, PB).to(k_ND.dtype)
            x_NP = project(k_ND, k_weight_DP, k_bias, s, P, PB, HAS_BIAS)
            plus, minus = features(x_NP, MAP, P)
            plus = tl.where(is_linear[:, None], plus, 0.0)
            minus = tl.where(is_linear[:, None], minus, 0.0)
            dS = suffix_S + at_state * (F * D)
            dz = suffix_z + at_state * F
            dS_PD = load_matrix(dS, 0, P, D, PB, DB)
            d_plus = dot(v_ND.to(dS_PD.dtype), tl.trans(dS_PD)) + load_vector(dz, P, PB)[None, :]
            d_minus = d_plus
            if NEED_INPUTS:
                dv_ND = dot(plus.to(dS_PD.dtype), dS_PD, dv_ND)
            if TWO:
                dS_PD = load_matrix(dS + P * D, 0, P, D, PB, DB)
                d_minus = dot(v_ND.to(dS_PD.dtype), tl.trans(dS_PD)) + load_vector(dz + P, P, PB)[None, :]
                if NEED_INPUTS:
                    dv_ND = dot(minus.to(dS_PD.dtype), dS_PD, dv_ND)
            if INNER:
                # Tiles whose state is not after this chunk, but some of whose windows are.
                behind = first + W if SLIDING else (first // W + BLOCKS) * W  # first query with a later window
                begin_tile = tl.maximum(tl.cdiv(behind + 1 - C, C), 0)
                end_tile = tl.minimum(first_tile(chunk + 1, SLIDING, W, BLOCKS, C), tl.cdiv(limit, C))
                inner = tl.maximum(end_tile - begin_tile, 0)
                for item in tl.range(0, inner * SHARING):
                    h = s * SHARING + item % SHARING
                    begin = (begin_tile + item // SHARING) * C
                    row = begin + tl.arange(0, C)
                    at = (b * HEADS + h) * tokens + first_token
                    q_MD, g_MD, delta_M = load_queries(
                        q + h * q_h, dy + h * dy_h, den + at, delta + at, begin, q_t, dy_t, limit, D, C, DB
                    )
                    q_weight_DP = load_matrix(q_weight + h * D * P, 0, D, P, DB, PB).to(q_MD.dtype)
                    q_plus, q_minus = features(project(q_MD, q_weight_DP, q_bias, h, P, PB, HAS_BIAS), MAP, P)
                    q_plus = q_plus.to(q_MD.dtype)
                    q_minus = q_minus.to(q_MD.dtype)
                    start = window_start(row, SLIDING, W, BLOCKS)
                    keep = (index[:, None] < start[None, :]) & (row < limit)[None, :]
                    if NEED_INPUTS:
                        weight_NM = dot(plus.to(q_MD.dtype), tl.trans(q_plus))
                        if TWO:
                            weight_NM = dot(minus.to(q_MD.dtype), tl.trans(q_minus), weight_NM)
                        weight_NM = tl.where(keep, weight_NM, 0.0)
                        dv_ND = dot(weight_NM.to(g_MD.dtype), g_MD, dv_ND)
                    d_weight = tl.where(keep, dot(v_ND, tl.trans(g_MD)) + delta_M[None, :], 0.0).to(q_MD.dtype)
                    d_plus = dot(d_weight, q_plus, d_plus)
                    if TWO:
                        d_minus = dot(d_weight, q_minus, d_minus)
            dx_NP = feature_gradient(x_NP, plus, minus, d_plus, d_minus, MAP, P)
            dx_NP = tl.where(is_linear[:, None], dx_NP, 0.0)
            store_rows(dx + (b * STATE_HEADS + s) * tokens * P, dx_NP, first, P, cells, 0, P)
            if NEED_INPUTS:
                dk_ND = dot(dx_NP.to(k_ND.dtype), tl.trans(k_weight_DP), dk_ND)
    if NEED_INPUTS:
        store_rows(dk, dk_ND, first, dk_t, cells, 0, D)
        store_rows(dv, dv_ND, first, dv_t, cells, 0, D)
