"""Gradients of the queries and of their projections, see `backward`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.backward_window import WindowGradients
from lolcats.ops.hybrid_attention.kernels.forward import Outputs
from lolcats.ops.hybrid_attention.kernels.launch import SIZES
from lolcats.ops.hybrid_attention.kernels.shape import Operands, rows
from lolcats.ops.hybrid_attention.kernels.tiles import (
    _FLOOR,
    before_window,
    dot,
    half_features,
    half_gradient,
    head_rows,
    index_of_tile,
    load_keys,
    load_matrix,
    load_rows,
    load_vector,
    load_weight,
    position_of_entry_0,
    project,
    query_tile,
    store_rows,
    store_vector,
    window_start,
)


class QueryGradients(NamedTuple):
    """dq [B, H, T, D], None if not needed. The others are None without a linear part: dx [B, H, T, P] of the
    projection; phi [B, H, T, F], the features over den, which the states' gradients are made of (2 F H bytes a token
    in half precision); tile_dz [B, H, N, F] and tile_dgamma [B, H, N], float32, each tile's part of the gradients of z
    and gamma; tile_at_sink [B, H, N], float32, what of the latter comes from rows in which the sink logit is the
    largest score, None without one."""

    dq: Tensor | None
    dx: Tensor | None = None
    phi: Tensor | None = None
    tile_dz: Tensor | None = None
    tile_dgamma: Tensor | None = None
    tile_at_sink: Tensor | None = None


def query_gradients(
    x: Operands,
    prefix_S: Tensor,
    prefix_z: Tensor,
    out: Outputs,
    window: WindowGradients,
    dy: Tensor,
    *,
    need_inputs: bool,
) -> QueryGradients:
    """Gradients of the queries and of their projections, and the queries' factors of the states' gradients."""
    grads = QueryGradients(torch.empty_like(x.q) if need_inputs else None)
    if x.is_linear:
        dx, phi = (x.empty_rows(n, dtype=x.q.dtype) for n in (x.shape.P, x.shape.F))
        at_sink = None if x.sink_logits is None else x.empty_tiles()
        grads = QueryGradients(grads.dq, dx, phi, x.empty_tiles(x.shape.F), x.empty_tiles(), at_sink)
    query_gradient_kernel[(x.sizes.chunk_rows * x.q.shape[1] * x.sizes.chunks,)](
        rows(x.q),
        rows(x.k),
        rows(x.v),
        rows(dy),
        x.maps,
        prefix_S,
        prefix_z,
        rows(x.sink_k),
        x.layout,
        out,
        window,
        rows(grads.dq),
        grads,
        *x.counts,
        x.sizes.sinks_there,
        NEED_INPUTS=need_inputs,
        shape=x.shape,
        num_warps=4,
        **({"num_stages": 1} if x.shape.WIDE else {"num_stages": 2, "maxnreg": 168}),
    )
    return grads


@triton.jit(do_not_specialize=SIZES)
def query_gradient_kernel(
    q,
    k,
    v,
    dy,
    maps,
    prefix_S,
    prefix_z,
    sink_k,
    layout,
    out,
    window,
    dq,
    grads,
    tokens,
    chunks,
    kv_heads,
    sinks_there,
    NEED_INPUTS: tl.constexpr,
    shape: tl.constexpr,
):
    """One program: C queries of one head, as in `window_gradient_kernel`."""
    HALVES: tl.constexpr = shape.HALVES
    P: tl.constexpr = shape.P
    F: tl.constexpr = shape.F
    D: tl.constexpr = shape.D
    C: tl.constexpr = shape.C
    DB: tl.constexpr = shape.DB
    PB: tl.constexpr = shape.PB
    WIDTH: tl.constexpr = shape.WINDOW + shape.SB
    tile = query_tile(layout, tokens, chunks, kv_heads, shape)
    at = tile.at
    first = tile.first
    limit = at.limit
    at_tile = index_of_tile(tile, chunks, kv_heads, shape)
    row = first + tl.arange(0, C)
    if shape.MAP != "none":
        dx = grads.dx + tile.at_first * P
    if NEED_INPUTS:
        dq = head_rows(dq, tile.h, at)
    if shape.RAGGED and first >= limit:
        if NEED_INPUTS:
            store_rows(dq.x, tl.zeros([C, DB], tl.float32), first, dq.t, at.cells, 0, D)
        if shape.MAP != "none":
            store_rows(dx, tl.zeros([C, PB], tl.float32), first, P, at.cells, 0, P)
            tl.store(grads.tile_dgamma + at_tile, 0.0)
            if grads.tile_at_sink is not None:
                tl.store(grads.tile_at_sink + at_tile, 0.0)
        return
    k = head_rows(k, tile.g, at)
    chunk = window_start(first, shape) // C

    if shape.MAP != "none":
        s = tile.h // (shape.REPEATS // shape.SHARES)
        first_position = position_of_entry_0(layout, at, shape)
        q = head_rows(q, tile.h, at)
        dy = head_rows(dy, tile.h, at)
        v = head_rows(v, tile.g, at)
        real = row < limit
        start = window_start(row, shape)
        end = window_start(tl.minimum(first + C, limit) - 1, shape)
        at_state = (tile.list_row * kv_heads * shape.SHARES + s) * chunks + at.first_chunk + chunk
        q_MD = load_rows(q.x, first, q.t, limit, 0, D, C, DB)
        dy_MD = load_rows(dy.x, first, dy.t, limit, 0, D, C, DB)
        at_row = tile.at_first + row
        inverse = 1.0 / tl.maximum(tl.load(out.den + at_row, mask=real, other=1.0), _FLOOR)
        delta = tl.load(window.delta + at_row, mask=real, other=0.0)
        q_weight_DP = load_weight(maps.q_weight, tile.h, q_MD.dtype, shape)
        x_MP = project(q_MD, q_weight_DP, maps.q_bias, tile.h, shape)
        dx_MP = tl.zeros_like(x_MP)
        linear = tl.zeros([C], tl.float32)  # phi . d_phi
        for half in tl.static_range(HALVES):
            sign = 1.0 - 2.0 * half
            S_PD = load_matrix(prefix_S + (at_state * F + half * P) * D, 0, P, D, PB, DB)
            part = half_features(sign * x_MP, shape)
            over_den = part * inverse[:, None]
            store_rows(grads.phi + tile.at_first * F + half * P, over_den, first, F, limit, 0, P)
            store_vector(grads.tile_dz + at_tile * F + half * P, tl.sum(over_den * delta[:, None], 0), P)
            z_P = load_vector(prefix_z + at_state * F + half * P, P, PB)
            d_part = dot(dy_MD.to(S_PD.dtype), tl.trans(S_PD)) + delta[:, None] * z_P[None, :]
            if shape.INNER:  # keys between the state and the windows
                k_weight_DP = load_weight(maps.k_weight, s, q_MD.dtype, shape)
                for key in tl.range(chunk * C, end, C):
                    k_ND, v_ND, index = load_keys(k, v, key, limit, shape, C)
                    k_part = half_features(sign * project(k_ND, k_weight_DP, maps.k_bias, s, shape), shape)
                    keep = before_window(index, start, first_position, shape)
                    d_weight = tl.where(keep, dot(dy_MD, tl.trans(v_ND)) + delta[:, None], 0.0)
                    d_part = dot(d_weight.to(k_ND.dtype), k_part.to(k_ND.dtype), d_part)
            linear += tl.sum(part * d_part, 1)
            dx_MP += sign * half_gradient(sign * x_MP, part, d_part, shape)
        total = tl.load(window.total + at_row, mask=real, other=0.0)
        share = tl.load(window.share + at_row, mask=real, other=0.0)
        dgamma = total - share * linear * inverse
        tl.store(grads.tile_dgamma + at_tile, tl.sum(dgamma, 0))
        if grads.tile_at_sink is not None:
            arg = tl.load(out.arg + at_row, mask=real, other=0)
            tl.store(grads.tile_at_sink + at_tile, tl.sum(tl.where(arg == -1 - shape.SB, dgamma, 0.0), 0))
        dx_MP *= inverse[:, None]  # zero where there is no token, as dy and delta are
        store_rows(dx, dx_MP, first, P, at.cells, 0, P)

    if NEED_INPUTS:
        dq_MD = tl.zeros([C, DB], tl.float32)
        if shape.MAP != "none":
            dq_MD = dot(dx_MP.to(q_MD.dtype), tl.trans(q_weight_DP), dq_MD)
        if shape.SINKS > 0:
            k_SD = load_rows(
                sink_k.x + at.n * sink_k.b + tile.g * sink_k.h,
                *(tile.slot * 0, sink_k.t, sinks_there, 0, D, shape.SB, DB),
            )
            at_sinks = window.scores + tile.at_first * WIDTH + shape.WINDOW
            ds_MS = load_rows(at_sinks, first, WIDTH, limit, 0, shape.SB, C, shape.SB)
            dq_MD = dot(ds_MS, k_SD, dq_MD)
        if shape.W > 0:
            at_key_0 = window.scores + tile.at_first * WIDTH + (shape.WINDOW - C - first)
            for key in tl.range(chunk * C, first + C, C):
                ds_MN = load_rows(at_key_0 + key, first, WIDTH, limit, 0, C, C, C)
                k_ND = load_rows(k.x, key, k.t, limit, 0, D, C, DB)
                dq_MD = dot(ds_MN, k_ND, dq_MD)
        store_rows(dq.x, dq_MD, first, dq.t, at.cells, 0, D)
