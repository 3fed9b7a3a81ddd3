"""Gradients of the states, of the keys and of the values, see `backward`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.backward_queries import QueryGradients
from lolcats.ops.hybrid_attention.kernels.backward_window import WindowGradients
from lolcats.ops.hybrid_attention.kernels.forward_states import scan_chunks
from lolcats.ops.hybrid_attention.kernels.launch import SIZES, cdiv
from lolcats.ops.hybrid_attention.kernels.shape import Operands, padded, rows
from lolcats.ops.hybrid_attention.kernels.tiles import (
    dot,
    half_features,
    half_gradient,
    head_rows,
    load_matrix,
    load_rows,
    load_vector,
    load_weight,
    locate,
    position_of_entry_0,
    project,
    store_matrix,
    store_rows,
    store_vector,
    window_start,
)

_COLUMNS = 64  # of the values, a program


class StateGradients(NamedTuple):
    """suffix_S [B, S, N, F, D] (input type) and suffix_z [B, S, N, F] (float32): what the sums receive from all
    that comes after each chunk; initial_S, initial_z: what the initial state receives, float32; None for no
    sequences."""

    suffix_S: Tensor
    suffix_z: Tensor
    initial_S: Tensor | None
    initial_z: Tensor | None


def state_gradients(
    x: Operands, queries: QueryGradients, dy: Tensor, dS: Tensor | None, dz: Tensor | None
) -> StateGradients:
    """`dS`, `dz`: gradients of the final state, or None."""
    S, z = x.empty_states()
    state_gradient_kernel[(z.shape[:3].numel() * cdiv(x.shape.D, _COLUMNS),)](
        rows(dy),
        queries.phi,
        queries.tile_dz,
        x.layout,
        S,
        z,
        *x.counts,
        shape=x.shape,
        FB=max(padded(x.shape.F), 64),
        BD=_COLUMNS,
        num_warps=4,
        num_stages=1 if x.shape.WIDE else 3,
    )
    return StateGradients(S, z, *scan_chunks(x, S, z, dS, dz, reverse=True))


@triton.jit
def first_tile(chunk, shape):
    """First tile of C queries that reads the state before `chunk` or a later one."""
    C: tl.constexpr = shape.C
    W: tl.constexpr = shape.W
    first = chunk * C + W - 1 if shape.SLIDING else (tl.cdiv(chunk * C, W) + shape.BLOCKS - 1) * W  # query
    return tl.where(chunk > 0, tl.cdiv(first, C), 0)


@triton.jit(do_not_specialize=SIZES)
def state_gradient_kernel(
    dy, phi, tile_dz, layout, S, z, tokens, chunks, kv_heads, shape: tl.constexpr, FB: tl.constexpr, BD: tl.constexpr
):
    """One program: the queries that read the state before one chunk, of all heads with this state; BD columns."""
    F: tl.constexpr = shape.F
    D: tl.constexpr = shape.D
    C: tl.constexpr = shape.C
    DBLOCKS: tl.constexpr = (D + BD - 1) // BD
    SHARING: tl.constexpr = shape.REPEATS // shape.SHARES  # query heads of one state
    program = tl.program_id(0)
    column = program % DBLOCKS * BD
    at_chunk = (program // DBLOCKS).to(tl.int64)  # of [B * S * N]
    slot = program // DBLOCKS % chunks
    bs = program // DBLOCKS // chunks
    heads = kv_heads * shape.REPEATS
    first_head = bs % (kv_heads * shape.SHARES) * SHARING
    list_row = (bs // (kv_heads * shape.SHARES)).to(tl.int64)
    at = locate(list_row, slot, layout, tokens, shape)
    chunk = slot - at.first_chunk
    if shape.RAGGED and chunk * C >= at.limit:
        return

    S_FD = tl.zeros([FB, BD], tl.float32)
    z_F = tl.zeros([FB], tl.float32)
    begin = first_tile(chunk, shape)
    end = tl.minimum(first_tile(chunk + 1, shape), tl.cdiv(at.limit, C))
    count = tl.maximum(end - begin, 0)
    dy = head_rows(dy, 0, at)
    for item in tl.range(0, count * SHARING):  # tiles of queries that read the state before `chunk`
        tile = begin + item // SHARING
        h = (first_head + item % SHARING).to(tl.int64)
        at_head = ((at.b * heads + h) * tokens + at.first_token) * F
        phi_MF = load_rows(phi + at_head, tile * C, F, at.limit, 0, F, C, FB)
        dy_MD = load_rows(dy.x + h * dy.h, tile * C, dy.t, at.limit, column, D, C, BD)
        S_FD = dot(tl.trans(phi_MF), dy_MD, S_FD)
        z_F += load_vector(tile_dz + ((list_row * heads + h) * chunks + at.first_chunk + tile) * F, F, FB)
    store_matrix(S + at_chunk * (F * D), S_FD, column, F, D)
    if column == 0:
        store_vector(z + at_chunk * F, z_F, F)


class KeyGradients(NamedTuple):
    """dk, dv [B, G, T, D] (None if not needed); dx [B, S, T, P] of the projection (None without a linear part)."""

    dk: Tensor | None
    dv: Tensor | None
    dx: Tensor | None


def key_gradients(
    x: Operands,
    window: WindowGradients,
    queries: QueryGradients,
    states: StateGradients | None,
    dy: Tensor,
    *,
    need_inputs: bool,
) -> KeyGradients:
    """Gradients of keys, values and the keys' projections."""
    dk = torch.empty_like(x.k) if need_inputs else None
    dv = torch.empty_like(x.v) if need_inputs else None
    dx = None
    if x.is_linear:
        size = (x.k.shape[0], x.sizes.kv_heads * x.shape.SHARES, x.sizes.tokens, x.shape.P)
        dx = torch.empty(size, device=x.k.device, dtype=x.k.dtype)
    sides = [(True, x.q, window.scores, dk), (False, dy, window.weights, dv)]
    for keys, factor, stored, grad in sides[: 2 if need_inputs else 1]:
        key_gradient_kernel[(x.sizes.chunk_rows * x.sizes.kv_heads * x.sizes.chunks,)](
            rows(x.k),
            rows(x.v),
            rows(dy),
            rows(factor),
            stored,
            x.maps,
            states,
            queries.phi,
            window.delta,
            x.layout,
            rows(grad),
            dx,
            *x.counts,
            KEYS=keys,
            NEED_INPUTS=need_inputs,
            shape=x.shape,
            num_warps=4,
            num_stages=1 if x.shape.WIDE else 2,
        )
    return KeyGradients(dk, dv, dx)


@triton.jit(do_not_specialize=SIZES)
def key_gradient_kernel(
    k,
    v,
    dy,
    factor,
    stored,
    maps,
    states,
    phi,
    delta,
    layout,
    grad,
    dx,
    tokens,
    chunks,
    kv_heads,
    KEYS: tl.constexpr,
    NEED_INPUTS: tl.constexpr,
    shape: tl.constexpr,
):
    """One program: C keys of one key/value head, all its query heads in turn.

    With KEYS dx, and grad = dk, if needed: `factor` is q, `stored` their scores' gradients. Otherwise grad = dv:
    `factor` is dy, `stored` the weights.
    """
    HALVES: tl.constexpr = shape.HALVES
    P: tl.constexpr = shape.P
    F: tl.constexpr = shape.F
    D: tl.constexpr = shape.D
    C: tl.constexpr = shape.C
    W: tl.constexpr = shape.W
    DB: tl.constexpr = shape.DB
    PB: tl.constexpr = shape.PB
    STATES: tl.constexpr = shape.SHARES
    SHARING: tl.constexpr = shape.REPEATS // STATES
    WIDTH: tl.constexpr = shape.WINDOW + shape.SB
    program = tl.program_id(0)
    slot = program % chunks
    bg = program // chunks
    list_row = (bg // kv_heads).to(tl.int64)
    g = bg % kv_heads
    heads = kv_heads * shape.REPEATS
    at = locate(list_row, slot, layout, tokens, shape)
    limit = at.limit
    chunk = slot - at.first_chunk
    first = chunk * C
    if NEED_INPUTS:
        grad = head_rows(grad, g, at)
    if shape.RAGGED and first >= limit:
        if NEED_INPUTS:
            store_rows(grad.x, tl.zeros([C, DB], tl.float32), first, grad.t, at.cells, 0, D)
        if KEYS and shape.MAP != "none":
            for s in tl.range(g * STATES, (g + 1) * STATES):
                dx_head = dx + ((at.b * kv_heads * STATES + s) * tokens + at.first_token) * P
                store_rows(dx_head, tl.zeros([C, PB], tl.float32), first, P, at.cells, 0, P)
        return
    dy = head_rows(dy, 0, at)
    factor = head_rows(factor, 0, at)

    grad_ND = tl.zeros([C, DB], tl.float32)
    if shape.MAP != "none":
        first_position = position_of_entry_0(layout, at, shape)
        k = head_rows(k, g, at)
        index = first + tl.arange(0, C)
        # Sinks, and keys that are still in the last window, are in no sum.
        end_key = window_start(limit - 1, shape)
        is_linear = ((index < end_key) & (first_position + index >= shape.SINKS))[:, None]
        k_ND = load_rows(k.x, first, k.t, limit, 0, D, C, DB)
        if KEYS:
            v = head_rows(v, g, at)
            v_ND = load_rows(v.x, first, v.t, limit, 0, D, C, DB)
        for own in tl.range(0, STATES, num_stages=1):
            s = g * STATES + own
            at_state = (list_row * kv_heads * STATES + s) * chunks + slot
            k_weight_DP = load_weight(maps.k_weight, s, k_ND.dtype, shape)
            x_NP = project(k_ND, k_weight_DP, maps.k_bias, s, shape)
            dx_NP = tl.zeros_like(x_NP)
            for half in tl.static_range(HALVES):
                sign = 1.0 - 2.0 * half
                part = tl.where(is_linear, half_features(sign * x_NP, shape), 0.0)
                dS_PD = load_matrix(states.suffix_S + (at_state * F + half * P) * D, 0, P, D, PB, DB)
                if KEYS:
                    dz_P = load_vector(states.suffix_z + at_state * F + half * P, P, PB)
                    d_part = dot(v_ND.to(dS_PD.dtype), tl.trans(dS_PD)) + dz_P[None, :]
                else:
                    grad_ND = dot(part.to(dS_PD.dtype), dS_PD, grad_ND)
                if shape.INNER:
                    # Tiles whose state is not after this chunk, but some of whose windows are.
                    behind = first + W if shape.SLIDING else (first // W + shape.BLOCKS) * W  # first later window's
                    begin_tile = tl.maximum(tl.cdiv(behind + 1 - C, C), 0)
                    end_tile = tl.minimum(first_tile(chunk + 1, shape), tl.cdiv(limit, C))
                    for item in tl.range(0, tl.maximum(end_tile - begin_tile, 0) * SHARING):
                        h = (s * SHARING + item % SHARING).to(tl.int64)
                        begin = (begin_tile + item // SHARING) * C
                        row = begin + tl.arange(0, C)
                        at_head = (at.b * heads + h) * tokens + at.first_token
                        dy_MD = load_rows(dy.x + h * dy.h, begin, dy.t, limit, 0, D, C, DB)
                        phi_MP = load_rows(phi + at_head * F + half * P, begin, F, limit, 0, P, C, PB)
                        start = window_start(row, shape)
                        keep = (index[:, None] < start[None, :]) & (row < limit)[None, :]
                        if KEYS:
                            row_delta = tl.load(delta + at_head + row, mask=row < limit, other=0.0)
                            d_weight_NM = tl.where(keep, dot(v_ND, tl.trans(dy_MD)) + row_delta[None, :], 0.0)
                            d_part = dot(d_weight_NM.to(phi_MP.dtype), phi_MP, d_part)
                        else:
                            weight_NM = tl.where(keep, dot(part.to(phi_MP.dtype), tl.trans(phi_MP)), 0.0)
                            grad_ND = dot(weight_NM.to(dy_MD.dtype), dy_MD, grad_ND)
                if KEYS:
                    dx_NP += sign * half_gradient(sign * x_NP, part, d_part, shape)
            if KEYS:
                dx_NP = tl.where(is_linear, dx_NP, 0.0)
                dx_head = dx + ((at.b * kv_heads * STATES + s) * tokens + at.first_token) * P
                store_rows(dx_head, dx_NP, first, P, at.cells, 0, P)
                if NEED_INPUTS:
                    grad_ND = dot(dx_NP.to(k_ND.dtype), tl.trans(k_weight_DP), grad_ND)

    if NEED_INPUTS:
        if W > 0:
            # Tiles from the chunk itself to the last one whose first window holds the chunk's last key.
            last_key = tl.minimum(first + C, limit) - 1
            end = last_key + W if shape.SLIDING else (last_key // W + shape.BLOCKS) * W
            count = tl.cdiv(tl.minimum(end, limit) - first, C)
            for item in tl.range(0, count * shape.REPEATS):
                h = (g * shape.REPEATS + item % shape.REPEATS).to(tl.int64)
                begin = first + item // shape.REPEATS * C
                at_row = (at.b * heads + h) * tokens + at.first_token
                at_first = at_row * WIDTH + (shape.WINDOW - C - begin + first)
                stored_MN = load_rows(stored + at_first, begin, WIDTH, limit, 0, C, C, C)
                factor_MD = load_rows(factor.x + h * factor.h, begin, factor.t, limit, 0, D, C, DB)
                grad_ND = dot(tl.trans(stored_MN), factor_MD, grad_ND)
        store_rows(grad.x, grad_ND, first, grad.t, at.cells, 0, D)
