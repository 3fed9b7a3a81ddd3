"""The window's part of the backward pass: weights and score gradients, see `backward`."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.forward import Outputs
from lolcats.ops.hybrid_attention.kernels.launch import SIZES
from lolcats.ops.hybrid_attention.kernels.shape import Operands, in_log2, rows
from lolcats.ops.hybrid_attention.kernels.tiles import (
    _FLOOR,
    dot,
    head_rows,
    in_window,
    index_of_tile,
    load_keys,
    load_rows,
    load_sinks,
    position_of_entry_0,
    query_tile,
    scaled_scores,
    sink_logit,
    store_rows,
    window_start,
)


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
    window_gradient_kernel[(x.sizes.chunk_rows * x.q.shape[1] * x.sizes.chunks,)](
        rows(x.q),
        rows(x.k),
        rows(x.v),
        rows(dy),
        rows(out.y),
        x.gamma,
        x.sink_logits,
        rows(x.sink_k),
        rows(x.sink_v),
        x.layout,
        out,
        grads,
        *x.counts,
        x.sizes.sinks_there,
        x.scale,
        in_log2(x.scale),
        in_log2(x.softcap),
        NEED_INPUTS=need_inputs,
        HAS_DELTA=out.delta is not None,
        CAP=x.config.linear_length_cap,
        shape=x.shape,
        num_warps=4,
        num_stages=1,
        **({"BN": 32} if x.shape.WIDE else {"BN": 64, "maxnreg": 168}),
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
    q,
    k,
    v,
    dy,
    y,
    gamma,
    sink_logits,
    sink_k,
    sink_v,
    layout,
    out,
    grads,
    tokens,
    chunks,
    kv_heads,
    sinks_there,
    scale,
    scale_log2,
    softcap,  # times log2(e), or None
    NEED_INPUTS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
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
    tile = query_tile(layout, tokens, chunks, kv_heads, shape)
    at = tile.at
    first = tile.first
    limit = at.limit
    row = first + tl.arange(0, C)
    real = row < limit
    at_row = tile.at_first + row
    at_tile = index_of_tile(tile, chunks, kv_heads, shape)
    if shape.RAGGED and first >= limit:
        if sink_logits is not None:
            tl.store(grads.tile_dsink + at_tile, 0.0)
        return

    q = head_rows(q, tile.h, at)
    dy = head_rows(dy, tile.h, at)
    q_MD = load_rows(q.x, first, q.t, limit, 0, D, C, shape.DB)
    dy_MD = load_rows(dy.x, first, dy.t, limit, 0, D, C, shape.DB)
    denominator = tl.load(out.den + at_row, mask=real, other=1.0)
    if HAS_DELTA:
        delta = tl.load(grads.delta + at_row, mask=real, other=0.0)
    else:
        y = head_rows(y, tile.h, at)
        y_MD = load_rows(y.x, first, y.t, limit, 0, D, C, shape.DB)
        delta = -tl.sum(dy_MD.to(tl.float32) * y_MD.to(tl.float32), 1)
        delta = tl.where(denominator >= _FLOOR, delta, 0.0)  # a clamped denominator is constant
        tl.store(grads.delta + at_row, delta, mask=real)

    total = tl.zeros([C], tl.float32)
    share = tl.zeros([C], tl.float32)  # sum of all w / gamma
    if shape.W > 0 or shape.SINKS > 0:
        first_position = position_of_entry_0(layout, at, shape)
        start = window_start(row, shape)
        inverse = 1.0 / tl.maximum(denominator, _FLOOR)
        top = tl.load(out.top + at_row, mask=real, other=0.0)
        arg = tl.load(out.arg + at_row, mask=real, other=0)
        beyond = tl.full([C], 1.0, tl.float32)  # what the length cap multiplies gamma by
        if CAP > 0:
            beyond = tl.maximum((first_position + row + 1).to(tl.float32) / CAP, 1.0)
        factor = tl.load(gamma + tile.h).to(tl.float32) * beyond
        if sink_logits is not None:
            share = tl.where(real, tl.exp2(sink_logit(sink_logits, tile.h) - top), 0.0) * inverse
            total = share * delta
            tl.store(grads.tile_dsink + at_tile, tl.sum(total * factor, 0))
        at_top = tl.zeros([C], tl.float32)  # ds / gamma of the maximal key
        if NEED_INPUTS:
            weights = grads.weights + tile.at_first * WIDTH
            scores = grads.scores + tile.at_first * WIDTH
        if shape.SINKS > 0:
            k_SD, v_SD, sink, sink_keep = load_sinks(sink_k, sink_v, tile, row, first_position, sinks_there, shape)
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
            k = head_rows(k, tile.g, at)
            v = head_rows(v, tile.g, at)
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
        elif not shape.HAS_INITIAL:
            total = tl.where(start > shape.SINKS, total, 0.0)
        at_arg = tl.where(arg < 0, WINDOW - 1 - arg, column + arg)
        if NEED_INPUTS:
            tl.debug_barrier()  # the entry was stored above, perhaps by another thread
            ds_top = _before_cap(at_top - total, top, softcap) * (factor * scale)
            address = scores + row.to(tl.int64) * WIDTH + at_arg
            tl.store(address, ds_top.to(scores.dtype.element_ty), mask=real & (at_arg < WIDTH))
        share = tl.where(denominator >= _FLOOR, share, 0.0)
        total *= (1.0 - share * factor) * beyond
        share *= beyond
    tl.store(grads.total + at_row, total, mask=real)
    tl.store(grads.share + at_row, share, mask=real)
