"""Backward pass: gradients of the outputs and of the final state, in six launches and a scan.

    window   weights and score gradients of every tile of queries, made once and stored for all later products
    queries  gradients of the queries and of their projections, and their features over the denominator
    states   what each stored state receives; a scan from the end, the mirror image of the forward one
    keys     gradients of keys (with their projections), then of values: a launch each, so that one sum per program
             stays in registers
    weights  of the feature maps: sums over all tokens of x^T dx
    sinks    sums over all queries

With delta = -(dy . y) and w = gamma p / den, the weight of a key in the window (p = exp(score - c_n)), its score
receives ds = w (dy . v + delta), less the row's sum of all ds at the maximal key, because c_n is part of the
function. A sink logit is one more score, of a key whose value is zero. With a softcap every ds is then times the
slope 1 - tanh^2 of its score. All other products with the window are w^T dy, ds^T q and ds k, straight from memory.

The features of a query receive (dy S^T + delta z) / den, and the same through the keys that no stored state holds.
The state before chunk m serves the query tiles whose first window starts in chunk m. So the keys of chunk j receive
the sum of (phi_q / den)^T [dy, delta] over all tiles that read a state after chunk j, and the gradient of the final
state; besides, they receive gradients from the queries that see them in their windows, and from those that see them
linearly but whose tile starts from an earlier state (INNER).

The gradient of gamma, times gamma, is a row's sum of w (dy . v + delta) over the keys of the window. The same sum over
the linear keys, phi . d_phi / den, would be its negative if delta were exact. But y was rounded: an error of delta
enters the first sum p times and the second 1 - p times, p being the sum of w over the window. So 1 - p times the first
less p times the second is the same gradient without that error, which would be its largest. It is also what the sink
logit owes in rows where it is the maximal score: there the error, left in, was up to 8e-3 of the logits' gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.forward import Outputs, States, scan_chunks
from lolcats.ops.hybrid_attention.kernels.operands import (
    INTERPRETED,
    SIZES,
    STATE_CHUNK,
    Operands,
    cdiv,
    in_log2,
    padded,
    rows,
)
from lolcats.ops.hybrid_attention.kernels.tiles import (
    _LOG2_E,
    FLOOR,
    before_window,
    dot,
    half_features,
    half_gradient,
    head_rows,
    in_window,
    index_of_tile,
    load_keys,
    load_matrix,
    load_rows,
    load_sinks,
    load_vector,
    load_weight,
    locate,
    position_of_entry_0,
    project,
    query_tile,
    scaled_scores,
    sequence,
    store_matrix,
    store_rows,
    store_vector,
    window_start,
)

_COLUMNS = 64  # of the values, a program of the states' gradients
# Programs that share the tokens of a sum over all of them: on an H200 four, or two, per multiprocessor.
_WEIGHT_PROGRAMS = 2 if INTERPRETED else 528
_SINK_PROGRAMS = 2 if INTERPRETED else 264


def backward(
    x: Operands, before: States, out: Outputs, dy: Tensor, *, need_inputs: bool, need_weights: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of the operator's first tensors, in their order, shapes and types, from that of y; None where not
    needed. Those of rows' sinks are in the gradients of k and v.

    before: the forward pass's states, without their ends; not read without a linear part.
    need_inputs: those of q, k, v and the sinks, which training only the feature maps does not need.
    need_weights: those of the feature maps.
    """
    window = window_gradients(x, out, dy, need_inputs=need_inputs)
    queries = query_gradients(x, before, out, window, dy, need_inputs=need_inputs)
    gamma, tile_dsink = x.window_factor.sigmoid(), window.tile_dsink
    if tile_dsink is not None and queries.tile_at_sink is not None:
        tile_dsink = tile_dsink - gamma[:, None] * queries.tile_at_sink
    states = state_gradients(x, queries, dy) if x.shape.F else None
    dk = dv = None
    of_maps: tuple[Tensor | None, ...] = (None,) * 4
    if need_inputs or need_weights:
        dk, dv, dx = key_gradients(x, window, queries, states, dy, need_inputs=need_inputs)
        if need_weights and queries.dx is not None and dx is not None:
            of_q, of_k = weight_gradients(x, x.q, queries.dx), weight_gradients(x, x.k, dx)
            sums = zip(x.maps, (of_q[0], of_k[0], of_q[1], of_k[1]), strict=True)
            of_maps = tuple(None if weight is None else grad.sum(0).to(weight.dtype) for weight, grad in sums)
    sinks: tuple[Tensor | None, ...] = (None, None)
    if dk is not None and dv is not None and x.sink_k is not None:
        sinks = sink_gradients(x, window, dy)
        if x.layout.table is None:
            for grad, of_sinks in zip((dk, dv), sinks, strict=True):
                grad[:, :, : x.sinks_there].add_(of_sinks)
            sinks = None, None
    return (
        *(queries.dq, dk, dv, _of_heads(gamma, queries.tile_dgamma) * gamma * (1 - gamma), *of_maps),
        _of_heads(x.sink_logits, tile_dsink),
        *sinks,
    )


def _of_heads(x_H: Tensor | None, tiles_BHN: Tensor | None) -> Any:
    """The gradient of what every head has one of, from all tiles'. Without a linear part nothing depends on gamma."""
    if x_H is None or tiles_BHN is None:
        return None if x_H is None else torch.zeros_like(x_H)
    return tiles_BHN.sum((0, 2)).to(x_H.dtype)


# The window.


class WindowGradients(NamedTuple):
    """delta, total and share [B, H, T], float32, where there are tokens. total - share phi . d_phi / den is the row's
    gradient of gamma: total = (1 - p) times the sum of all ds / gamma, and share = p / gamma, p being the sum of all w,
    or zero where the denominator is clamped. (Beyond the length cap a row's factor is gamma times a number, and so is
    its gradient.) Both sums have the sink logit's term. tile_dsink [B, H, N], float32: each tile's part of the gradient
    of the sink logits, without what rows owe whose maximal score is the sink logit; or None.

    weights, scores: w, and the gradients of q . k, which are ds times the scale and the softcap's slope: [B, H, T,
    WINDOW + SB] in the type of q; None if not needed. A row holds WINDOW keys in whole chunks, of which the last is
    that of its tile, then padded sinks. Chunks that no row of the tile has in its window are not written. Together they
    take 4 (WINDOW + SB) H bytes a token in half precision: 16 KiB for the default window and 32 heads, 136 KiB for a
    sliding window of 1024.
    """

    delta: Tensor
    total: Tensor
    share: Tensor
    tile_dsink: Tensor | None
    weights: Tensor | None
    scores: Tensor | None


def window_gradients(x: Operands, out: Outputs, dy: Tensor, *, need_inputs: bool) -> WindowGradients:
    """What all later kernels need of the rows, and of the window."""
    weights = scores = None
    if need_inputs and x.config.has_softmax:
        weights, scores = (x.empty_rows(x.shape.WINDOW + x.shape.SB, dtype=x.q.dtype) for _ in range(2))
    delta = x.empty_rows() if out.delta is None else out.delta
    tile_dsink = None if x.sink_logits is None else x.empty_tiles()
    grads = WindowGradients(delta, x.empty_rows(), x.empty_rows(), tile_dsink, weights, scores)
    window_gradient_kernel[x.tiles](
        x.inputs,
        rows(dy),
        rows(out.y),
        out,
        grads,
        *x.counts,
        x.sinks_there,
        x.scale,
        in_log2(x.scale),
        in_log2(x.softcap),
        CAP=x.config.linear_length_cap,
        shape=x.shape,
        num_warps=4,
        num_stages=1,
        **({"BN": 32} if x.wide else {"BN": 64, "maxnreg": 168}),
    )
    return grads


@triton.jit
def _before_cap(ds, score, softcap):
    """Gradients of scores before the softcap from those after it, where the scores are `score`."""
    return ds if softcap is None else ds * (1.0 - (score / softcap) * (score / softcap))


@triton.jit
def _weights(q_MD, dy_MD, k_ND, v_ND, keep, top, inverse, delta, scale_log2, softcap):
    """w / gamma and ds / gamma of one tile of keys, without what c_n does, and the latter before the cap: [M, N]."""
    score = scaled_scores(dot(q_MD, tl.trans(k_ND)), scale_log2, softcap)
    weight = tl.where(keep, tl.exp2(score - top[:, None]), 0.0) * inverse[:, None]
    ds = weight * (dot(dy_MD, tl.trans(v_ND)) + delta[:, None])
    return weight, ds, _before_cap(ds, score, softcap)


@triton.jit(do_not_specialize=SIZES)
def window_gradient_kernel(
    x,  # `Inputs`
    dy,
    y,
    out,
    grads,
    tokens,
    chunks,
    kv_heads,
    sinks_there,
    scale,
    scale_log2,
    softcap,  # times log2(e), or None
    CAP: tl.constexpr,  # the linear length cap
    shape: tl.constexpr,
    BN: tl.constexpr,
):
    """One program: C queries of one head."""
    D: tl.constexpr = shape.D
    C: tl.constexpr = shape.C
    SB: tl.constexpr = shape.SB
    WINDOW: tl.constexpr = shape.WINDOW
    WIDTH: tl.constexpr = WINDOW + SB
    NEED_INPUTS: tl.constexpr = grads.weights is not None
    tile = query_tile(x.layout, tokens, chunks, kv_heads, shape)
    at = tile.at
    first = tile.first
    limit = at.limit
    row = first + tl.arange(0, C)
    real = row < limit
    at_row = tile.at_first + row
    at_tile = index_of_tile(tile, chunks, kv_heads, shape)
    if x.layout.table is not None and first >= limit:
        if x.sink_logits is not None:
            tl.store(grads.tile_dsink + at_tile, 0.0)
        return

    q = head_rows(x.q, tile.h, at)
    dy = head_rows(dy, tile.h, at)
    q_MD = load_rows(q.x, first, q.t, limit, 0, D, C, shape.DB)
    dy_MD = load_rows(dy.x, first, dy.t, limit, 0, D, C, shape.DB)
    denominator = tl.load(out.den + at_row, mask=real, other=1.0)
    if out.delta is not None:
        delta = tl.load(out.delta + at_row, mask=real, other=0.0)
    else:
        y = head_rows(y, tile.h, at)
        y_MD = load_rows(y.x, first, y.t, limit, 0, D, C, shape.DB)
        delta = -tl.sum(dy_MD.to(tl.float32) * y_MD.to(tl.float32), 1)
        delta = tl.where(denominator >= FLOOR, delta, 0.0)  # a clamped denominator is constant
        tl.store(grads.delta + at_row, delta, mask=real)

    total = tl.zeros([C], tl.float32)
    share = tl.zeros([C], tl.float32)  # sum of all w / gamma
    if shape.W > 0 or shape.SINKS > 0:
        first_position = position_of_entry_0(x.layout, at)
        start = window_start(row, shape)
        inverse = 1.0 / tl.maximum(denominator, FLOOR)
        top = tl.load(out.top + at_row, mask=real, other=0.0)
        arg = tl.load(out.arg + at_row, mask=real, other=0)
        beyond = tl.full([C], 1.0, tl.float32)  # what the length cap multiplies gamma by
        if CAP > 0:
            beyond = tl.maximum((first_position + row + 1).to(tl.float32) / CAP, 1.0)
        gamma = tl.sigmoid(tl.load(x.window_factor + tile.h).to(tl.float32))
        factor = gamma * beyond
        if x.sink_logits is not None:
            logit = tl.load(x.sink_logits + tile.h).to(tl.float32) * _LOG2_E
            share = tl.where(real, tl.exp2(logit - top), 0.0) * inverse
            total = share * delta
            tl.store(grads.tile_dsink + at_tile, tl.sum(total * factor, 0))
        at_top = tl.zeros([C], tl.float32)  # ds / gamma of the maximal key
        if NEED_INPUTS:
            weights = grads.weights + tile.at_first * WIDTH
            scores = grads.scores + tile.at_first * WIDTH
        if shape.SINKS > 0:
            k_SD, v_SD, sink, sink_keep = load_sinks(x.sink_k, x.sink_v, tile, row, first_position, sinks_there, shape)
            weight_MS, ds_MS, inner_MS = _weights(
                q_MD, dy_MD, k_SD, v_SD, sink_keep, top, inverse, delta, scale_log2, softcap
            )
            total += tl.sum(ds_MS, 1)
            share += tl.sum(weight_MS, 1)
            if NEED_INPUTS:
                at_top += tl.sum(tl.where((-1 - sink)[None, :] == arg[:, None], ds_MS, 0.0), 1)
                store_rows(weights + WINDOW, weight_MS * factor[:, None], first, WIDTH, limit, 0, SB)
                store_rows(scores + WINDOW, inner_MS * (factor * scale)[:, None], first, WIDTH, limit, 0, SB)
        column = WINDOW - C - first  # of key 0
        if shape.W > 0:
            k = head_rows(x.k, tile.g, at)
            v = head_rows(x.v, tile.g, at)
            for key in tl.range(window_start(first, shape) // C * C, first + C, BN):
                k_ND, v_ND, index = load_keys(k, v, key, limit, shape, BN)
                keep = in_window(index, row, start, first_position, shape)
                weight_MN, ds_MN, inner_MN = _weights(
                    q_MD, dy_MD, k_ND, v_ND, keep, top, inverse, delta, scale_log2, softcap
                )
                total += tl.sum(ds_MN, 1)
                share += tl.sum(weight_MN, 1)
                if NEED_INPUTS:
                    at_top += tl.sum(tl.where(index[None, :] == arg[:, None], ds_MN, 0.0), 1)
                    store_rows(weights + column + key, weight_MN * factor[:, None], first, WIDTH, limit, 0, BN)
                    store_rows(scores + column + key, inner_MN * (factor * scale)[:, None], first, WIDTH, limit, 0, BN)
        # Rows without any linear key do not depend on gamma and c_n; their sums are zero but for rounding.
        if shape.MAP == "none":
            total = tl.zeros([C], tl.float32)
        elif x.layout.base is None:
            total = tl.where(start > shape.SINKS, total, 0.0)
        at_arg = tl.where(arg < 0, WINDOW - 1 - arg, column + arg)
        if NEED_INPUTS:
            tl.debug_barrier()  # the entry was stored above, perhaps by another thread
            ds_top = _before_cap(at_top - total, top, softcap) * (factor * scale)
            address = scores + row.to(tl.int64) * WIDTH + at_arg
            tl.store(address, ds_top.to(scores.dtype.element_ty), mask=real & (at_arg < WIDTH))
        share = tl.where(denominator >= FLOOR, share, 0.0)
        total *= (1.0 - share * factor) * beyond
        share *= beyond
    tl.store(grads.total + at_row, total, mask=real)
    tl.store(grads.share + at_row, share, mask=real)


# Queries.


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
    x: Operands, before: States, out: Outputs, window: WindowGradients, dy: Tensor, *, need_inputs: bool
) -> QueryGradients:
    """Gradients of the queries and of their projections, and the queries' factors of the states' gradients."""
    grads = QueryGradients(torch.empty_like(x.q) if need_inputs else None)
    if x.shape.F:
        dx, phi = (x.empty_rows(n, dtype=x.q.dtype) for n in (x.shape.P, x.shape.F))
        at_sink = None if x.sink_logits is None else x.empty_tiles()
        grads = QueryGradients(grads.dq, dx, phi, x.empty_tiles(x.shape.F), x.empty_tiles(), at_sink)
    query_gradient_kernel[x.tiles](
        x.inputs,
        rows(dy),
        before,
        out,
        window,
        rows(grads.dq),
        grads,
        *x.counts,
        x.sinks_there,
        shape=x.shape,
        num_warps=4,
        **({"num_stages": 1} if x.wide else {"num_stages": 3, "maxnreg": 128 if x.narrow else 168}),
    )
    return grads


@triton.jit(do_not_specialize=SIZES)
def query_gradient_kernel(
    x,  # `Inputs`
    dy,
    before,  # `States`
    out,
    window,
    dq,
    grads,
    tokens,
    chunks,
    kv_heads,
    sinks_there,
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
    NEED_INPUTS: tl.constexpr = dq.x is not None
    tile = query_tile(x.layout, tokens, chunks, kv_heads, shape)
    at = tile.at
    first = tile.first
    limit = at.limit
    at_tile = index_of_tile(tile, chunks, kv_heads, shape)
    row = first + tl.arange(0, C)
    if shape.MAP != "none":
        dx = grads.dx + tile.at_first * P
    if NEED_INPUTS:
        dq = head_rows(dq, tile.h, at)
    if x.layout.table is not None and first >= limit:
        if NEED_INPUTS:
            store_rows(dq.x, tl.zeros([C, DB], tl.float32), first, dq.t, at.cells, 0, D)
        if shape.MAP != "none":
            store_rows(dx, tl.zeros([C, PB], tl.float32), first, P, at.cells, 0, P)
            tl.store(grads.tile_dgamma + at_tile, 0.0)
            if grads.tile_at_sink is not None:
                tl.store(grads.tile_at_sink + at_tile, 0.0)
        return
    k = head_rows(x.k, tile.g, at)
    chunk = window_start(first, shape) // C

    if shape.MAP != "none":
        s = tile.h // (shape.REPEATS // shape.SHARES)
        first_position = position_of_entry_0(x.layout, at)
        q = head_rows(x.q, tile.h, at)
        dy = head_rows(dy, tile.h, at)
        v = head_rows(x.v, tile.g, at)
        real = row < limit
        start = window_start(row, shape)
        end = window_start(tl.minimum(first + C, limit) - 1, shape)
        at_state = (tile.list_row * kv_heads * shape.SHARES + s) * chunks + at.first_chunk + chunk
        q_MD = load_rows(q.x, first, q.t, limit, 0, D, C, DB)
        dy_MD = load_rows(dy.x, first, dy.t, limit, 0, D, C, DB)
        at_row = tile.at_first + row
        inverse = 1.0 / tl.maximum(tl.load(out.den + at_row, mask=real, other=1.0), FLOOR)
        delta = tl.load(window.delta + at_row, mask=real, other=0.0)
        q_weight_DP = load_weight(x.maps.q_weight, tile.h, q_MD.dtype, shape)
        x_MP = project(q_MD, q_weight_DP, x.maps.q_bias, tile.h, shape)
        dx_MP = tl.zeros_like(x_MP)
        linear = tl.zeros([C], tl.float32)  # phi . d_phi
        for half in tl.static_range(HALVES):
            sign = 1.0 - 2.0 * half
            S_PD = load_matrix(before.S + (at_state * F + half * P) * D, 0, P, D, PB, DB)
            part = half_features(sign * x_MP, shape)
            over_den = part * inverse[:, None]
            store_rows(grads.phi + tile.at_first * F + half * P, over_den, first, F, limit, 0, P)
            store_vector(grads.tile_dz + at_tile * F + half * P, tl.sum(over_den * delta[:, None], 0), P)
            z_P = load_vector(before.z + at_state * F + half * P, P, PB)
            d_part = dot(dy_MD.to(S_PD.dtype), tl.trans(S_PD)) + delta[:, None] * z_P[None, :]
            if shape.INNER:  # keys between the state and the windows
                k_weight_DP = load_weight(x.maps.k_weight, s, q_MD.dtype, shape)
                for key in tl.range(chunk * C, end, C):
                    k_ND, v_ND, index = load_keys(k, v, key, limit, shape, C)
                    k_part = half_features(sign * project(k_ND, k_weight_DP, x.maps.k_bias, s, shape), shape)
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
                x.sink_k.x + at.n * x.sink_k.b + tile.g * x.sink_k.h,
                *(tile.slot * 0, x.sink_k.t, sinks_there, 0, D, shape.SB, DB),
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


# States, keys and values.


def state_gradients(x: Operands, queries: QueryGradients, dy: Tensor) -> States:
    """What the sums receive from all that comes after each chunk."""
    states = States.empty(x)
    state_gradient_kernel[(states.z.shape[:3].numel() * cdiv(x.shape.D, _COLUMNS),)](
        x.layout,
        rows(dy),
        queries,
        states,
        *x.counts,
        shape=x.shape,
        FB=max(padded(x.shape.F), 64),
        BD=_COLUMNS,
        num_warps=4 if x.wide else 8,
        num_stages=1 if x.wide else 3,
    )
    scan_chunks(x, states, None, reverse=True)
    return states


@triton.jit
def first_tile(chunk, shape):
    """First tile of C queries that reads the state before `chunk` or a later one."""
    C: tl.constexpr = shape.C
    W: tl.constexpr = shape.W
    first = chunk * C + W - 1 if shape.SLIDING else (tl.cdiv(chunk * C, W) + shape.BLOCKS - 1) * W  # query
    return tl.where(chunk > 0, tl.cdiv(first, C), 0)


@triton.jit(do_not_specialize=SIZES)
def state_gradient_kernel(
    layout, dy, queries, states, tokens, chunks, kv_heads, shape: tl.constexpr, FB: tl.constexpr, BD: tl.constexpr
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
    at = locate(list_row, slot, layout, tokens)
    chunk = slot - at.first_chunk
    if layout.table is not None and chunk * C >= at.limit:
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
        phi_MF = load_rows(queries.phi + at_head, tile * C, F, at.limit, 0, F, C, FB)
        dy_MD = load_rows(dy.x + h * dy.h, tile * C, dy.t, at.limit, column, D, C, BD)
        S_FD = dot(tl.trans(phi_MF), dy_MD, S_FD)
        z_F += load_vector(queries.tile_dz + ((list_row * heads + h) * chunks + at.first_chunk + tile) * F, F, FB)
    store_matrix(states.S + at_chunk * (F * D), S_FD, column, F, D)
    if column == 0:
        store_vector(states.z + at_chunk * F, z_F, F)


def key_gradients(
    x: Operands,
    window: WindowGradients,
    queries: QueryGradients,
    states: States | None,
    dy: Tensor,
    *,
    need_inputs: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dk, dv [B, G, T, D] (None if not needed); dx [B, S, T, P] of the projection (None without a linear part)."""
    dk, dv = (torch.empty_like(each) if need_inputs else None for each in (x.k, x.v))
    dx = x.k.new_empty(len(x.k), x.state_heads, x.k.shape[2], x.shape.P) if x.shape.F else None
    sides = [(True, x.q, window.scores, dk), (False, dy, window.weights, dv)]
    for keys, factor, stored, grad in sides[: 2 if need_inputs else 1]:
        key_gradient_kernel[(x.lists[0] * x.k.shape[1] * x.lists[1],)](
            x.inputs,
            rows(dy),
            rows(factor),
            stored,
            states,
            queries.phi,
            window.delta,
            rows(grad),
            dx,
            *x.counts,
            KEYS=keys,
            shape=x.shape,
            num_warps=8 if x.narrow else 4,
            **({"num_stages": 1} if x.wide else {"num_stages": 3, "maxnreg": 128 if x.narrow else 168}),
        )
    return dk, dv, dx


@triton.jit(do_not_specialize=SIZES)
def key_gradient_kernel(
    x,  # `Inputs`
    dy,
    factor,
    stored,
    states,
    phi,
    delta,
    grad,
    dx,
    tokens,
    chunks,
    kv_heads,
    KEYS: tl.constexpr,
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
    NEED_INPUTS: tl.constexpr = grad.x is not None
    program = tl.program_id(0)
    slot = program % chunks
    bg = program // chunks
    list_row = (bg // kv_heads).to(tl.int64)
    g = bg % kv_heads
    heads = kv_heads * shape.REPEATS
    at = locate(list_row, slot, x.layout, tokens)
    limit = at.limit
    chunk = slot - at.first_chunk
    first = chunk * C
    if NEED_INPUTS:
        grad = head_rows(grad, g, at)
    if x.layout.table is not None and first >= limit:
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
        first_position = position_of_entry_0(x.layout, at)
        k = head_rows(x.k, g, at)
        index = first + tl.arange(0, C)
        # Sinks, and keys that are still in the last window, are in no sum.
        end_key = window_start(limit - 1, shape)
        is_linear = ((index < end_key) & (first_position + index >= shape.SINKS))[:, None]
        k_ND = load_rows(k.x, first, k.t, limit, 0, D, C, DB)
        if KEYS:
            v = head_rows(x.v, g, at)
            v_ND = load_rows(v.x, first, v.t, limit, 0, D, C, DB)
        for own in tl.range(0, STATES, num_stages=1):
            s = g * STATES + own
            at_state = (list_row * kv_heads * STATES + s) * chunks + slot
            k_weight_DP = load_weight(x.maps.k_weight, s, k_ND.dtype, shape)
            x_NP = project(k_ND, k_weight_DP, x.maps.k_bias, s, shape)
            dx_NP = tl.zeros_like(x_NP)
            for half in tl.static_range(HALVES):
                sign = 1.0 - 2.0 * half
                part = tl.where(is_linear, half_features(sign * x_NP, shape), 0.0)
                dS_PD = load_matrix(states.S + (at_state * F + half * P) * D, 0, P, D, PB, DB)
                if KEYS:
                    dz_P = load_vector(states.z + at_state * F + half * P, P, PB)
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


# Sums over all tokens: of the feature maps' weights and of the sinks.


def weight_gradients(operands: Operands, x: Tensor, dx: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, G, T, D] (q or k of the operands) and dx [B, S, T, P] (contiguous; S a multiple of G): shares of
    [S, D, P] and of [S, P] in float32.

    Each program adds up a share of the tokens; the caller adds the shares, so that results do not depend on the order
    in which programs run.
    """
    heads = dx.shape[1]
    tiles = operands.lists[0] * operands.lists[1]
    splits = max(min(cdiv(_WEIGHT_PROGRAMS, heads), tiles), 1)
    d_weight = torch.empty(splits, heads, x.shape[3], dx.shape[3], device=x.device, dtype=torch.float32)
    d_bias = torch.empty(splits, heads, dx.shape[3], device=x.device, dtype=torch.float32)
    weight_gradient_kernel[(heads * splits,)](
        rows(x),
        dx,
        operands.layout,
        d_weight,
        d_bias,
        *operands.counts[:2],
        heads,
        tiles,
        splits,
        shape=operands.shape,
        SHARING=heads // x.shape[1],
        PB=padded(dx.shape[3]),
        **({"num_warps": 8, "num_stages": 2} if operands.wide else {"num_warps": 4, "num_stages": 5}),
    )
    return d_weight, d_bias


@triton.jit(do_not_specialize=SIZES)
def weight_gradient_kernel(
    x,
    dx,
    layout,
    d_weight,
    d_bias,
    tokens,
    chunks,
    heads,  # of dx
    tiles,  # chunks of all lists
    splits,
    shape: tl.constexpr,
    SHARING: tl.constexpr,  # heads of dx that share one of x
    PB: tl.constexpr,
):
    """One program: every `splits`-th tile of one head."""
    P: tl.constexpr = shape.P
    D: tl.constexpr = shape.D
    DB: tl.constexpr = shape.DB
    program = tl.program_id(0)
    h = (program % heads).to(tl.int64)
    split = program // heads
    d_weight_DP = tl.zeros([DB, PB], tl.float32)
    d_bias_P = tl.zeros([PB], tl.float32)
    for tile in tl.range(split, tiles, splits):
        slot = tile % chunks
        at = locate(tl.cast(tile // chunks, tl.int64), slot, layout, tokens)
        first = (slot - at.first_chunk) * shape.C
        x_head = head_rows(x, h // SHARING, at)
        dx_head = dx + ((at.b * heads + h) * tokens + at.first_token) * P
        x_MD = load_rows(x_head.x, first, x_head.t, at.limit, 0, D, shape.C, DB)
        dx_MP = load_rows(dx_head, first, P, at.limit, 0, P, shape.C, PB)
        d_weight_DP = dot(tl.trans(x_MD), dx_MP, d_weight_DP)
        d_bias_P += tl.sum(dx_MP.to(tl.float32), 0)
    at_share = split * heads + h
    store_matrix(d_weight + at_share * D * P, d_weight_DP, 0, D, P)
    store_vector(d_bias + at_share * P, d_bias_P, P)


def sink_gradients(x: Operands, window: WindowGradients, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of sink_k and sink_v, in their shapes and types. Every query of a sequence sees the sinks, so programs
    add up shares of the queries."""
    assert x.sink_k is not None
    tiles = cdiv(x.q.shape[2], STATE_CHUNK)
    sequences, kv_heads, there, head_dim = x.sink_k.shape
    splits = max(min(cdiv(_SINK_PROGRAMS, sequences * kv_heads), tiles), 1)
    size = (splits, sequences, kv_heads, x.shape.SINKS, head_dim)
    d_sink_k, d_sink_v = (torch.empty(size, device=x.q.device, dtype=torch.float32) for _ in range(2))
    sink_gradient_kernel[(sequences * kv_heads * splits,)](
        rows(x.q),
        rows(dy),
        window.weights,
        window.scores,
        x.layout,
        d_sink_k,
        d_sink_v,
        x.q.shape[2],
        kv_heads,
        splits,
        shape=x.shape,
        num_warps=4,
        num_stages=1 if x.wide else 2,
    )
    d_sink_k, d_sink_v = (share[:, :, :, :there].sum(0) for share in (d_sink_k, d_sink_v))
    return d_sink_k.to(x.sink_k.dtype), d_sink_v.to(x.v.dtype)


@triton.jit(do_not_specialize=SIZES)
def sink_gradient_kernel(
    q, dy, weights, scores, layout, d_sink_k, d_sink_v, tokens, kv_heads, splits, shape: tl.constexpr
):
    """One program: every `splits`-th tile of the queries of one key/value head."""
    D: tl.constexpr = shape.D
    DB: tl.constexpr = shape.DB
    C: tl.constexpr = shape.C
    SB: tl.constexpr = shape.SB
    REPEATS: tl.constexpr = shape.REPEATS
    WIDTH: tl.constexpr = shape.WINDOW + SB
    program = tl.program_id(0)
    split = program % splits
    bg = (program // splits).to(tl.int64)
    g = bg % kv_heads
    at = sequence(bg // kv_heads, layout, tokens)
    q = head_rows(q, 0, at)
    dy = head_rows(dy, 0, at)
    dk_SD = tl.zeros([SB, DB], tl.float32)
    dv_SD = tl.zeros([SB, DB], tl.float32)
    for item in tl.range(split, tl.cdiv(at.limit, C) * REPEATS, splits):
        h = g * REPEATS + item % REPEATS
        begin = item // REPEATS * C
        at_row = ((at.b * kv_heads * REPEATS + h) * tokens + at.first_token) * WIDTH + shape.WINDOW
        weight_MS = load_rows(weights + at_row, begin, WIDTH, at.limit, 0, SB, C, SB)
        dy_MD = load_rows(dy.x + h * dy.h, begin, dy.t, at.limit, 0, D, C, DB)
        dv_SD = dot(tl.trans(weight_MS), dy_MD, dv_SD)
        ds_MS = load_rows(scores + at_row, begin, WIDTH, at.limit, 0, SB, C, SB)
        q_MD = load_rows(q.x + h * q.h, begin, q.t, at.limit, 0, D, C, DB)
        dk_SD = dot(tl.trans(ds_MS), q_MD, dk_SD)
    at_sink = (split * (tl.num_programs(0) // splits) + bg) * shape.SINKS * D
    store_matrix(d_sink_k + at_sink, dk_SD, 0, shape.SINKS, D)
    store_matrix(d_sink_v + at_sink, dv_SD, 0, shape.SINKS, D)
