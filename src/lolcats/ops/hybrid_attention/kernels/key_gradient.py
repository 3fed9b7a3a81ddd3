"""Backward pass, key side: one program per chunk of keys of one key/value head, all its query heads in turn.

A key receives gradients from the queries that see it in their windows, from those that see it linearly but
whose tile starts from an earlier state (`inner`), and through the states from all later ones. Its value does, too;
a launch for each of the two keeps one sum per program in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.features import half_features, half_gradient, project
from lolcats.ops.hybrid_attention.kernels.operands import Operands, or_dummy, strides
from lolcats.ops.hybrid_attention.kernels.positions import locate, window_start
from lolcats.ops.hybrid_attention.kernels.query_gradient import QueryGradients
from lolcats.ops.hybrid_attention.kernels.state_gradient import StateGradients, first_tile
from lolcats.ops.hybrid_attention.kernels.tiles import dot, load_matrix, load_rows, load_vector, store_rows
from lolcats.ops.hybrid_attention.kernels.tuning import tuned
from lolcats.ops.hybrid_attention.kernels.window_gradient import WindowGradients

_CONFIGS = ({"warps": 4, "stages": 2}, {"warps": 4, "stages": 3})
_WIDE = ({"warps": 4, "stages": 1},)


@dataclass(frozen=True)
class KeyGradients:
    """dk, dv [B, G, T, D] (None if not needed); dx [B, S, T, P] of the projection (None without a linear part)."""

    dk: Tensor | None
    dv: Tensor | None
    dx: Tensor | None


def key_gradients(
    operands: Operands,
    window: WindowGradients,
    queries: QueryGradients,
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
    sides = [(True, x.q, window.scores, dk), (False, dy, window.weights, dv)]
    for keys, rows, stored, grad in sides[: 2 if need_inputs else 1]:
        key_gradient_kernel(x.head_dim, x.q.dtype)[(x.chunk_rows * x.kv_heads * x.chunks,)](
            x.k,
            x.v,
            dy,
            rows,
            or_dummy(stored, x.q),
            or_dummy(x.k_weight, x.q),
            or_dummy(x.k_bias, x.q),
            x.q if states is None else states.suffix_S,
            x.q if states is None else states.suffix_z,
            or_dummy(queries.phi, x.q),
            window.delta,
            *x.layout,
            or_dummy(grad, x.k),
            or_dummy(dx, x.k),
            *strides(x.k),
            *strides(x.v),
            *strides(dy),
            *strides(rows),
            *strides(grad),
            x.tokens,
            x.chunks,
            KEYS=keys,
            NEED_INPUTS=need_inputs,
            **x.constants(key_gradient_kernel),
        )
    return KeyGradients(dk, dv, dx)


@tuned(_CONFIGS, _WIDE)
def key_gradient_kernel(
    k,
    v,
    dy,
    rows,
    stored,
    k_weight,
    k_bias,
    suffix_S,
    suffix_z,
    phi,
    delta,
    length,
    base,
    table,
    slots,
    grad,
    dx,
    k_b,
    k_g,
    k_t,
    v_b,
    v_g,
    v_t,
    dy_b,
    dy_h,
    dy_t,
    rows_b,
    rows_h,
    rows_t,
    grad_b,
    grad_g,
    grad_t,
    tokens,
    chunks,
    KEYS: tl.constexpr,
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
    """One program: C keys of one key/value head.

    With KEYS dx, and grad = dk, if needed: `rows` are q, `stored` their scores' gradients. Otherwise grad = dv:
    `rows` are dy, `stored` the weights.
    """
    HALVES: tl.constexpr = F // P
    REPEATS: tl.constexpr = HEADS // KV_HEADS
    SHARING: tl.constexpr = HEADS // STATE_HEADS
    STATES: tl.constexpr = STATE_HEADS // KV_HEADS
    WIDTH: tl.constexpr = WINDOW + SB
    program = tl.program_id(0)
    slot = program % chunks
    bg = program // chunks
    list_row = (bg // KV_HEADS).to(tl.int64)
    g = bg % KV_HEADS
    n, b, first_token, cells, limit, first_chunk = locate(
        list_row, slot, length, table, slots, tokens, HAS_LENGTH, RAGGED
    )
    chunk = slot - first_chunk
    rows += b * rows_b + first_token * rows_t
    dy += b * dy_b + first_token * dy_t
    grad += b * grad_b + g * grad_g + first_token * grad_t

    first = chunk * C
    if (HAS_LENGTH or RAGGED) and first >= limit:
        if NEED_INPUTS:
            store_rows(grad, tl.zeros([C, DB], tl.float32), first, grad_t, cells, 0, D)
        if KEYS and MAP != "none":
            for s in tl.range(g * STATES, (g + 1) * STATES):
                dx_head = dx + ((b * STATE_HEADS + s) * tokens + first_token) * P
                store_rows(dx_head, tl.zeros([C, PB], tl.float32), first, P, cells, 0, P)
        return

    grad_ND = tl.zeros([C, DB], tl.float32)
    if MAP != "none":
        first_position = 0
        if HAS_BASE:
            first_position = tl.load(base + n)
        index = first + tl.arange(0, C)
        # Sinks, and keys that are still in the last window, are in no sum.
        end_key = window_start(limit - 1, SLIDING, W, BLOCKS)
        is_linear = ((index < end_key) & (first_position + index >= SINKS))[:, None]
        k_ND = load_rows(k + b * k_b + g * k_g + first_token * k_t, first, k_t, limit, 0, D, C, DB)
        if KEYS:
            v_ND = load_rows(v + b * v_b + g * v_g + first_token * v_t, first, v_t, limit, 0, D, C, DB)
        for own in tl.range(0, STATES, num_stages=1):
            s = g * STATES + own
            at_state = (list_row * STATE_HEADS + s) * chunks + slot
            k_weight_DP = load_matrix(k_weight + s * D * P, 0, D, P, DB, PB).to(k_ND.dtype)
            x_NP = project(k_ND, k_weight_DP, k_bias, s, P, PB, HAS_BIAS)
            dx_NP = tl.zeros_like(x_NP)
            for half in tl.static_range(HALVES):
                sign = 1.0 - 2.0 * half
                part = tl.where(is_linear, half_features(sign * x_NP, MAP, P), 0.0)
                dS_PD = load_matrix(suffix_S + (at_state * F + half * P) * D, 0, P, D, PB, DB)
                if KEYS:
                    dz_P = load_vector(suffix_z + at_state * F + half * P, P, PB)
                    d_part = dot(v_ND.to(dS_PD.dtype), tl.trans(dS_PD)) + dz_P[None, :]
                else:
                    grad_ND = dot(part.to(dS_PD.dtype), dS_PD, grad_ND)
                if INNER:
                    # Tiles whose state is not after this chunk, but some of whose windows are.
                    behind = first + W if SLIDING else (first // W + BLOCKS) * W  # first query with a later window
                    begin_tile = tl.maximum(tl.cdiv(behind + 1 - C, C), 0)
                    end_tile = tl.minimum(first_tile(chunk + 1, SLIDING, W, BLOCKS, C), tl.cdiv(limit, C))
                    for item in tl.range(0, tl.maximum(end_tile - begin_tile, 0) * SHARING):
                        h = s * SHARING + item % SHARING
                        begin = (begin_tile + item // SHARING) * C
                        row = begin + tl.arange(0, C)
                        at = (b * HEADS + h) * tokens + first_token
                        dy_MD = load_rows(dy + h * dy_h, begin, dy_t, limit, 0, D, C, DB)
                        phi_MP = load_rows(phi + at * F + half * P, begin, F, limit, 0, P, C, PB)
                        start = window_start(row, SLIDING, W, BLOCKS)
                        keep = (index[:, None] < start[None, :]) & (row < limit)[None, :]
                        if KEYS:
                            row_delta = tl.load(delta + at + row, mask=row < limit, other=0.0)
                            d_weight_NM = tl.where(keep, dot(v_ND, tl.trans(dy_MD)) + row_delta[None, :], 0.0)
                            d_part = dot(d_weight_NM.to(phi_MP.dtype), phi_MP, d_part)
                        else:
                            weight_NM = tl.where(keep, dot(part.to(phi_MP.dtype), tl.trans(phi_MP)), 0.0)
                            grad_ND = dot(weight_NM.to(dy_MD.dtype), dy_MD, grad_ND)
                if KEYS:
                    dx_NP += sign * half_gradient(sign * x_NP, part, d_part, MAP, P)
            if KEYS:
                dx_NP = tl.where(is_linear, dx_NP, 0.0)
                dx_head = dx + ((b * STATE_HEADS + s) * tokens + first_token) * P
                store_rows(dx_head, dx_NP, first, P, cells, 0, P)
                if NEED_INPUTS:
                    grad_ND = dot(dx_NP.to(k_ND.dtype), tl.trans(k_weight_DP), grad_ND)

    if NEED_INPUTS:
        if W > 0:
            # Tiles from the chunk itself to the last one whose first window holds the chunk's last key.
            last_key = tl.minimum(first + C, limit) - 1
            end = last_key + W if SLIDING else (last_key // W + BLOCKS) * W
            count = tl.cdiv(tl.minimum(end, limit) - first, C)
            for item in tl.range(0, count * REPEATS):
                h = g * REPEATS + item % REPEATS
                begin = first + item // REPEATS * C
                at = ((b * HEADS + h) * tokens + first_token) * WIDTH + (WINDOW - C - begin + first)
                stored_MN = load_rows(stored + at, begin, WIDTH, limit, 0, C, C, C)
                rows_MD = load_rows(rows + h * rows_h, begin, rows_t, limit, 0, D, C, DB)
                grad_ND = dot(tl.trans(stored_MN), rows_MD, grad_ND)
        store_rows(grad, grad_ND, first, grad_t, cells, 0, D)
