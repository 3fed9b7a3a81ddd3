"""Backward pass of the window: weights and score gradients of every tile of queries, made once and stored.

With delta = -(dy . y) and w = gamma p / den, the weight of a key in the window (p = exp(score - c_n)), its score
receives ds = w (dy . v + delta), less the row's sum of all ds at the maximal key, because c_n is part of the
function. All other products with the window are w^T dy, ds^T q and ds k, straight from memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.constants import _FLOOR, LOG2_E
from lolcats.ops.hybrid_attention.kernels.operands import Operands, or_dummy, strides
from lolcats.ops.hybrid_attention.kernels.outputs import Outputs
from lolcats.ops.hybrid_attention.kernels.positions import locate, window_start
from lolcats.ops.hybrid_attention.kernels.tiles import dot, load_rows, store_rows
from lolcats.ops.hybrid_attention.kernels.tuning import tuned

_CONFIGS = (
    {"BN": 64, "warps": 4, "stages": 1, "registers": 168},
    {"BN": 64, "warps": 4, "stages": 1},
)
_WIDE = ({"BN": 32, "warps": 4, "stages": 1},)


@dataclass(frozen=True)
class WindowGradients:
    """delta, total and share [B, H, T], float32, where there are tokens. total - share phi . d_phi / den is the row's
    gradient of gamma, as `query_gradient` says: total = (1 - p) times the sum of all ds / gamma, and share = p / gamma,
    p being the sum of all w, or zero where the denominator is clamped.

    weights, scores: w, and ds times the scale of scores, [B, H, T, WINDOW + SB] in the type of q; None if not needed.
    A row holds WINDOW keys in whole chunks, of which the last is that of its tile, then padded sinks. Chunks that no
    row of the tile has in its window are not written. Together they take 4 (WINDOW + SB) H bytes a token in half
    precision: 16 KiB for the default window and 32 heads, 136 KiB for a sliding window of 1024.
    """

    delta: Tensor
    total: Tensor
    share: Tensor
    weights: Tensor | None
    scores: Tensor | None


def window_gradients(operands: Operands, out: Outputs, dy: Tensor, *, need_inputs: bool) -> WindowGradients:
    """What all later kernels need of the rows, and of the window."""
    x = operands
    rows = (x.batch, x.heads, x.tokens)
    weights = scores = None
    if need_inputs and x.spec.has_softmax:
        width = x.window_columns + x.sink_columns
        weights, scores = (torch.empty(*rows, width, device=x.q.device, dtype=x.q.dtype) for _ in range(2))
    total, share = (torch.empty(rows, device=x.q.device, dtype=torch.float32) for _ in range(2))
    delta = torch.empty_like(total) if out.delta is None else out.delta
    window_gradient_kernel(x.head_dim, x.q.dtype)[(x.chunk_rows * x.heads * x.chunks,)](
        x.q,
        x.k,
        x.v,
        dy,
        out.y,
        x.gamma,
        or_dummy(x.sink_k, x.k),
        or_dummy(x.sink_v, x.v),
        *x.layout,
        out.den,
        out.top,
        out.arg,
        delta,
        total,
        share,
        or_dummy(weights, x.q),
        or_dummy(scores, x.q),
        *strides(x.q),
        *strides(x.k),
        *strides(x.v),
        *strides(dy),
        *strides(out.y),
        *strides(x.sink_k),
        *strides(x.sink_v),
        x.tokens,
        x.chunks,
        0 if x.sink_k is None else x.sink_k.shape[2],
        x.scale,
        x.scale * LOG2_E,
        NEED_INPUTS=need_inputs,
        HAS_DELTA=out.delta is not None,
        **x.constants(window_gradient_kernel),
    )
    return WindowGradients(delta, total, share, weights, scores)


@triton.jit
def _weights(q_MD, dy_MD, k_ND, v_ND, keep, top, inverse, delta, scale_log2):
    """w / gamma and ds / gamma of one tile of keys, without what c_n does: [M, N]."""
    score = dot(q_MD, tl.trans(k_ND)) * scale_log2
    weight = tl.where(keep, tl.exp2(score - top[:, None]), 0.0) * inverse[:, None]
    return weight, weight * (dot(dy_MD, tl.trans(v_ND)) + delta[:, None])


@tuned(_CONFIGS, _WIDE)
def window_gradient_kernel(
    q,
    k,
    v,
    dy,
    y,
    gamma,
    sink_k,
    sink_v,
    length,
    base,
    table,
    slots,
    den,
    top_in,
    arg_in,
    delta_out,
    total_out,
    share_out,
    weights,
    scores,
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
    tokens,
    chunks,
    sinks_there,
    scale,
    scale_log2,
    NEED_INPUTS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
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
    SB: tl.constexpr,
    WINDOW: tl.constexpr,
    BN: tl.constexpr,
):
    """One program: C queries of one head. Heads that share keys run next to each other."""
    REPEATS: tl.constexpr = HEADS // KV_HEADS
    WIDTH: tl.constexpr = WINDOW + SB
    program = tl.program_id(0)
    slot = program // REPEATS % chunks
    bg = program // REPEATS // chunks
    g = bg % KV_HEADS
    h = g * REPEATS + program % REPEATS
    n, b, first_token, _, limit, first_chunk = locate(
        (bg // KV_HEADS).to(tl.int64), slot, length, table, slots, tokens, HAS_LENGTH, RAGGED
    )
    first = (slot - first_chunk) * C
    row = first + tl.arange(0, C)
    real = row < limit
    at_first = (b * HEADS + h) * tokens + first_token
    at = at_first + row
    if (HAS_LENGTH or RAGGED) and first >= limit:
        return

    q_MD = load_rows(q + b * q_b + h * q_h + first_token * q_t, first, q_t, limit, 0, D, C, DB)
    dy_MD = load_rows(dy + b * dy_b + h * dy_h + first_token * dy_t, first, dy_t, limit, 0, D, C, DB)
    denominator = tl.load(den + at, mask=real, other=1.0)
    if HAS_DELTA:
        delta = tl.load(delta_out + at, mask=real, other=0.0)
    else:
        y_MD = load_rows(y + b * y_b + h * y_h + first_token * y_t, first, y_t, limit, 0, D, C, DB)
        delta = -tl.sum(dy_MD.to(tl.float32) * y_MD.to(tl.float32), 1)
        delta = tl.where(denominator >= _FLOOR, delta, 0.0)  # a clamped denominator is constant
        tl.store(delta_out + at, delta, mask=real)

    total = tl.zeros([C], tl.float32)
    share = tl.zeros([C], tl.float32)  # sum of all w / gamma
    if W > 0 or SINKS > 0:
        first_position = 0
        if HAS_BASE:
            first_position = tl.load(base + n)
        start = window_start(row, SLIDING, W, BLOCKS)
        inverse = 1.0 / tl.maximum(denominator, _FLOOR)
        top = tl.load(top_in + at, mask=real, other=0.0)
        arg = tl.load(arg_in + at, mask=real, other=0)
        factor = tl.load(gamma + h).to(tl.float32)
        at_top = tl.zeros([C], tl.float32)  # ds / gamma of the maximal key
        weights += at_first * WIDTH
        scores += at_first * WIDTH
        if SINKS > 0:
            sink = tl.arange(0, SB)
            sink_k_SD = load_rows(sink_k + n * sk_b + g * sk_g, slot * 0, sk_t, sinks_there, 0, D, SB, DB)
            sink_v_SD = load_rows(sink_v + n * sv_b + g * sv_g, slot * 0, sv_t, sinks_there, 0, D, SB, DB)
            sink_keep = (sink < sinks_there)[None, :] & (sink[None, :] <= first_position + row[:, None])
            weight_MS, ds_MS = _weights(q_MD, dy_MD, sink_k_SD, sink_v_SD, sink_keep, top, inverse, delta, scale_log2)
            total += tl.sum(ds_MS, 1)
            share += tl.sum(weight_MS, 1)
            if NEED_INPUTS:
                at_top += tl.sum(tl.where((-1 - sink)[None, :] == arg[:, None], ds_MS, 0.0), 1)
                store_rows(weights + WINDOW, weight_MS * factor, first, WIDTH, limit, 0, SB)
                store_rows(scores + WINDOW, ds_MS * (factor * scale), first, WIDTH, limit, 0, SB)
        column = WINDOW - C - first  # of key 0
        if W > 0:
            k += b * k_b + g * k_g + first_token * k_t
            v += b * v_b + g * v_g + first_token * v_t
            for key in tl.range(window_start(first, SLIDING, W, BLOCKS) // C * C, first + C, BN):
                k_ND = load_rows(k, key, k_t, limit, 0, D, BN, DB)
                v_ND = load_rows(v, key, v_t, limit, 0, D, BN, DB)
                index = key + tl.arange(0, BN)
                keep = (index[None, :] <= row[:, None]) & (index[None, :] >= start[:, None])
                if SINKS > 0:
                    keep = keep & (first_position + index >= SINKS)[None, :]
                weight_MN, ds_MN = _weights(q_MD, dy_MD, k_ND, v_ND, keep, top, inverse, delta, scale_log2)
                total += tl.sum(ds_MN, 1)
                share += tl.sum(weight_MN, 1)
                if NEED_INPUTS:
                    at_top += tl.sum(tl.where(index[None, :] == arg[:, None], ds_MN, 0.0), 1)
                    store_rows(weights + column + key, weight_MN * factor, first, WIDTH, limit, 0, BN)
                    store_rows(scores + column + key, ds_MN * (factor * scale), first, WIDTH, limit, 0, BN)
        # Rows without any linear key do not depend on gamma and c_n; their sums are zero but for rounding.
        if MAP == "none":
            total = tl.zeros([C], tl.float32)
        elif not HAS_INITIAL:
            total = tl.where(start > SINKS, total, 0.0)
        if NEED_INPUTS:
            tl.debug_barrier()  # the entry was stored above, perhaps by another thread
            at_arg = tl.where(arg < 0, WINDOW - 1 - arg, column + arg)
            ds_top = ((at_top - total) * (factor * scale)).to(scores.dtype.element_ty)
            # scores that are not finite may leave a row without a maximal key
            tl.store(scores + row.to(tl.int64) * WIDTH + at_arg, ds_top, mask=real & (at_arg >= 0))
        share = tl.where(denominator >= _FLOOR, share, 0.0)
        total *= 1.0 - share * factor
    tl.store(total_out + at, total, mask=real)
    tl.store(share_out + at, share, mask=real)
