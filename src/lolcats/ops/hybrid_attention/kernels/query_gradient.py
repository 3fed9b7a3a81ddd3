"""Backward pass, query side: one program per tile of queries of one head.

The features of a query receive (dy S^T + delta z) / den, and the same through the keys that no stored state holds.

The gradient of gamma, times gamma, is a row's sum of w (dy . v + delta) over the keys of the window. The same sum over
the linear keys, phi . d_phi / den, would be its negative if delta were exact. But y was rounded: an error of delta
enters the first sum p times and the second 1 - p times, p being the sum of w over the window. So 1 - p times the first
less p times the second is the same gradient without that error, which would be its largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.constants import _FLOOR
from lolcats.ops.hybrid_attention.kernels.features import half_features, half_gradient, project
from lolcats.ops.hybrid_attention.kernels.operands import Operands, or_dummy, strides
from lolcats.ops.hybrid_attention.kernels.outputs import Outputs
from lolcats.ops.hybrid_attention.kernels.positions import locate, window_start
from lolcats.ops.hybrid_attention.kernels.tiles import (
    dot,
    load_matrix,
    load_rows,
    load_vector,
    store_rows,
    store_vector,
)
from lolcats.ops.hybrid_attention.kernels.tuning import tuned
from lolcats.ops.hybrid_attention.kernels.window_gradient import WindowGradients

_CONFIGS = ({"warps": 4, "stages": 2, "registers": 168}, {"warps": 4, "stages": 1})
_WIDE = ({"warps": 4, "stages": 1},)


@dataclass(frozen=True)
class QueryGradients:
    """dq [B, H, T, D], None if not needed. The others are None without a linear part: dx [B, H, T, P] of the
    projection; phi [B, H, T, F], the features over den, which the states' gradients are made of (2 F H bytes a token
    in half precision); tile_dz [B, H, N, F] and tile_dgamma [B, H, N], float32, each tile's part of the gradients of z
    and gamma."""

    dq: Tensor | None
    dx: Tensor | None
    phi: Tensor | None
    tile_dz: Tensor | None
    tile_dgamma: Tensor | None


def query_gradients(
    operands: Operands,
    prefix_S: Tensor,
    prefix_z: Tensor,
    out: Outputs,
    window: WindowGradients,
    dy: Tensor,
    *,
    need_inputs: bool,
) -> QueryGradients:
    """Gradients of the queries and of their projections, and the queries' factors of the states' gradients.

    prefix_S, prefix_z: of `States`; not read without a linear part.
    """
    x = operands
    rows = (x.batch, x.heads, x.tokens)
    dq = torch.empty_like(x.q) if need_inputs else None
    dx = phi = tile_dz = tile_dgamma = None
    if x.spec.feature_map is not None:
        dx, phi = (torch.empty(*rows, n, device=x.q.device, dtype=x.q.dtype) for n in (x.columns, x.features))
        tiles = (x.chunk_rows, x.heads, x.chunks)
        tile_dz, tile_dgamma = (
            torch.empty(shape, device=x.q.device, dtype=torch.float32) for shape in ((*tiles, x.features), tiles)
        )
    query_gradient_kernel(x.head_dim, x.q.dtype)[(x.chunk_rows * x.heads * x.chunks,)](
        x.q,
        x.k,
        x.v,
        dy,
        or_dummy(x.q_weight, x.q),
        or_dummy(x.q_bias, x.q),
        or_dummy(x.k_weight, x.q),
        or_dummy(x.k_bias, x.q),
        prefix_S,
        prefix_z,
        or_dummy(x.sink_k, x.k),
        *x.layout,
        out.den,
        window.delta,
        window.total,
        window.share,
        or_dummy(window.scores, x.q),
        or_dummy(dq, x.q),
        or_dummy(dx, x.q),
        or_dummy(phi, x.q),
        or_dummy(tile_dz, x.q),
        or_dummy(tile_dgamma, x.q),
        *strides(x.q),
        *strides(x.k),
        *strides(x.v),
        *strides(dy),
        *strides(x.sink_k),
        *strides(dq),
        x.tokens,
        x.chunks,
        0 if x.sink_k is None else x.sink_k.shape[2],
        NEED_INPUTS=need_inputs,
        **x.constants(query_gradient_kernel),
    )
    return QueryGradients(dq, dx, phi, tile_dz, tile_dgamma)


@tuned(_CONFIGS, _WIDE)
def query_gradient_kernel(
    q,
    k,
    v,
    dy,
    q_weight,
    q_bias,
    k_weight,
    k_bias,
    prefix_S,
    prefix_z,
    sink_k,
    length,
    base,
    table,
    slots,
    den,
    delta_in,
    total_in,
    share_in,
    scores,
    dq,
    dx,
    phi,
    tile_dz,
    tile_dgamma,
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
    sk_b,
    sk_g,
    sk_t,
    dq_b,
    dq_h,
    dq_t,
    tokens,
    chunks,
    sinks_there,
    NEED_INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WINDOW: tl.constexpr,
    SB: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    STATE_HEADS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    F: tl.constexpr,
    MAP: tl.constexpr,
    SLIDING: tl.constexpr,
    INNER: tl.constexpr,
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
    """One program: C queries of one head, as in `window_gradient_kernel`."""
    HALVES: tl.constexpr = F // P
    REPEATS: tl.constexpr = HEADS // KV_HEADS
    WIDTH: tl.constexpr = WINDOW + SB
    program = tl.program_id(0)
    slot = program // REPEATS % chunks
    bg = program // REPEATS // chunks
    list_row = (bg // KV_HEADS).to(tl.int64)
    g = bg % KV_HEADS
    h = g * REPEATS + program % REPEATS
    s = h // (HEADS // STATE_HEADS)
    n, b, first_token, cells, limit, first_chunk = locate(
        list_row, slot, length, table, slots, tokens, HAS_LENGTH, RAGGED
    )
    at_first = (b * HEADS + h) * tokens + first_token
    at_tile = (list_row * HEADS + h) * chunks + slot
    k += b * k_b + g * k_g + first_token * k_t
    dq += b * dq_b + h * dq_h + first_token * dq_t
    dx += at_first * P

    first = (slot - first_chunk) * C
    row = first + tl.arange(0, C)
    if (HAS_LENGTH or RAGGED) and first >= limit:
        if NEED_INPUTS:
            store_rows(dq, tl.zeros([C, DB], tl.float32), first, dq_t, cells, 0, D)
        if MAP != "none":
            store_rows(dx, tl.zeros([C, PB], tl.float32), first, P, cells, 0, P)
            tl.store(tile_dgamma + at_tile, 0.0)
        return
    chunk = window_start(first, SLIDING, W, BLOCKS) // C

    if MAP != "none":
        first_position = 0
        if HAS_BASE:
            first_position = tl.load(base + n)
        v += b * v_b + g * v_g + first_token * v_t
        real = row < limit
        start = window_start(row, SLIDING, W, BLOCKS)
        end = window_start(tl.minimum(first + C, limit) - 1, SLIDING, W, BLOCKS)
        at_state = (list_row * STATE_HEADS + s) * chunks + first_chunk + chunk
        q_MD = load_rows(q + b * q_b + h * q_h + first_token * q_t, first, q_t, limit, 0, D, C, DB)
        dy_MD = load_rows(dy + b * dy_b + h * dy_h + first_token * dy_t, first, dy_t, limit, 0, D, C, DB)
        at = at_first + row
        inverse = 1.0 / tl.maximum(tl.load(den + at, mask=real, other=1.0), _FLOOR)
        delta = tl.load(delta_in + at, mask=real, other=0.0)
        q_weight_DP = load_matrix(q_weight + h * D * P, 0, D, P, DB, PB).to(q_MD.dtype)
        x_MP = project(q_MD, q_weight_DP, q_bias, h, P, PB, HAS_BIAS)
        dx_MP = tl.zeros_like(x_MP)
        linear = tl.zeros([C], tl.float32)  # phi . d_phi
        for half in tl.static_range(HALVES):
            sign = 1.0 - 2.0 * half
            S_PD = load_matrix(prefix_S + (at_state * F + half * P) * D, 0, P, D, PB, DB)
            part = half_features(sign * x_MP, MAP, P)
            over_den = part * inverse[:, None]
            store_rows(phi + at_first * F + half * P, over_den, first, F, limit, 0, P)
            store_vector(tile_dz + at_tile * F + half * P, tl.sum(over_den * delta[:, None], 0), P)
            z_P = load_vector(prefix_z + at_state * F + half * P, P, PB)
            d_part = dot(dy_MD.to(S_PD.dtype), tl.trans(S_PD)) + delta[:, None] * z_P[None, :]
            if INNER:  # keys between the state and the windows
                k_weight_DP = load_matrix(k_weight + s * D * P, 0, D, P, DB, PB).to(q_MD.dtype)
                for key in tl.range(chunk * C, end, C):
                    k_ND = load_rows(k, key, k_t, limit, 0, D, C, DB)
                    v_ND = load_rows(v, key, v_t, limit, 0, D, C, DB)
                    index = key + tl.arange(0, C)
                    k_part = half_features(sign * project(k_ND, k_weight_DP, k_bias, s, P, PB, HAS_BIAS), MAP, P)
                    keep = index[None, :] < start[:, None]
                    if SINKS > 0:
                        keep = keep & (first_position + index >= SINKS)[None, :]
                    d_weight = tl.where(keep, dot(dy_MD, tl.trans(v_ND)) + delta[:, None], 0.0)
                    d_part = dot(d_weight.to(k_ND.dtype), k_part.to(k_ND.dtype), d_part)
            linear += tl.sum(part * d_part, 1)
            dx_MP += sign * half_gradient(sign * x_MP, part, d_part, MAP, P)
        total = tl.load(total_in + at, mask=real, other=0.0)
        share = tl.load(share_in + at, mask=real, other=0.0)
        tl.store(tile_dgamma + at_tile, tl.sum(total - share * linear * inverse, 0))
        dx_MP *= inverse[:, None]  # zero where there is no token, as dy and delta are
        store_rows(dx, dx_MP, first, P, cells, 0, P)

    if NEED_INPUTS:
        dq_MD = tl.zeros([C, DB], tl.float32)
        if MAP != "none":
            dq_MD = dot(dx_MP.to(q_MD.dtype), tl.trans(q_weight_DP), dq_MD)
        scores += at_first * WIDTH
        if SINKS > 0:
            sink_k_SD = load_rows(sink_k + n * sk_b + g * sk_g, slot * 0, sk_t, sinks_there, 0, D, SB, DB)
            ds_MS = load_rows(scores + WINDOW, first, WIDTH, limit, 0, SB, C, SB)
            dq_MD = dot(ds_MS, sink_k_SD, dq_MD)
        if W > 0:
            scores += WINDOW - C - first
            for key in tl.range(chunk * C, first + C, C):
                ds_MN = load_rows(scores + key, first, WIDTH, limit, 0, C, C, C)
                k_ND = load_rows(k, key, k_t, limit, 0, D, C, DB)
                dq_MD = dot(ds_MN, k_ND, dq_MD)
        store_rows(dq, dq_MD, first, dq_t, cells, 0, D)
