"""Backward pass of the sinks: every query of the sequence sees them, so programs add up shares of the queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.constants import INTERPRETED, STATE_CHUNK
from lolcats.ops.hybrid_attention.kernels.operands import Operands, or_dummy, strides
from lolcats.ops.hybrid_attention.kernels.positions import sequence
from lolcats.ops.hybrid_attention.kernels.tiles import dot, load_rows, store_matrix
from lolcats.ops.hybrid_attention.kernels.tuning import tuned
from lolcats.ops.hybrid_attention.kernels.window_gradient import WindowGradients

_PROGRAMS = 2 if INTERPRETED else 264
_CONFIGS = ({"warps": 4, "stages": 1}, {"warps": 4, "stages": 2})
_WIDE = ({"warps": 4, "stages": 1},)


def sink_gradients(operands: Operands, window: WindowGradients, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of sink_k and sink_v, in their shapes and types."""
    x = operands
    assert x.sink_k is not None
    assert x.sink_v is not None
    tiles = triton.cdiv(x.tokens, STATE_CHUNK)
    sequences, there = x.sink_k.shape[0], x.sink_k.shape[2]
    splits = max(min(triton.cdiv(_PROGRAMS, sequences * x.kv_heads), tiles), 1)
    shape = (splits, sequences, x.kv_heads, x.spec.sinks, x.head_dim)
    d_sink_k, d_sink_v = (torch.empty(shape, device=x.q.device, dtype=torch.float32) for _ in range(2))
    sink_gradient_kernel(x.head_dim, x.q.dtype)[(sequences * x.kv_heads * splits,)](
        x.q,
        dy,
        window.weights,
        window.scores,
        or_dummy(x.length, x.q),
        or_dummy(x.table, x.q),
        d_sink_k,
        d_sink_v,
        *strides(x.q),
        *strides(dy),
        x.tokens,
        splits,
        **x.constants(sink_gradient_kernel),
    )
    d_sink_k, d_sink_v = (share[:, :, :, :there].sum(0) for share in (d_sink_k, d_sink_v))
    return d_sink_k.to(x.sink_k.dtype), d_sink_v.to(x.sink_v.dtype)


@tuned(_CONFIGS, _WIDE)
def sink_gradient_kernel(
    q,
    dy,
    weights,
    scores,
    length,
    table,
    d_sink_k,
    d_sink_v,
    q_b,
    q_h,
    q_t,
    dy_b,
    dy_h,
    dy_t,
    tokens,
    splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    SINKS: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    RAGGED: tl.constexpr,
    CROWDED: tl.constexpr,
    C: tl.constexpr,
    DB: tl.constexpr,
    SB: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One program: every `splits`-th tile of the queries of one key/value head."""
    REPEATS: tl.constexpr = HEADS // KV_HEADS
    WIDTH: tl.constexpr = WINDOW + SB
    program = tl.program_id(0)
    split = program % splits
    bg = program // splits
    n = (bg // KV_HEADS).to(tl.int64)
    g = bg % KV_HEADS
    b, first_token, _, limit, _ = sequence(n, length, table, tokens, HAS_LENGTH, RAGGED)
    q += b * q_b + first_token * q_t
    dy += b * dy_b + first_token * dy_t
    dk_SD = tl.zeros([SB, DB], tl.float32)
    dv_SD = tl.zeros([SB, DB], tl.float32)
    for item in tl.range(split, tl.cdiv(limit, C) * REPEATS, splits):
        h = g * REPEATS + item % REPEATS
        begin = item // REPEATS * C
        at = ((b * HEADS + h) * tokens + first_token) * WIDTH + WINDOW
        weight_MS = load_rows(weights + at, begin, WIDTH, limit, 0, SB, C, SB)
        dy_MD = load_rows(dy + h * dy_h, begin, dy_t, limit, 0, D, C, DB)
        dv_SD = dot(tl.trans(weight_MS), dy_MD, dv_SD)
        ds_MS = load_rows(scores + at, begin, WIDTH, limit, 0, SB, C, SB)
        q_MD = load_rows(q + h * q_h, begin, q_t, limit, 0, D, C, DB)
        dk_SD = dot(tl.trans(ds_MS), q_MD, dk_SD)
    at_sink = (split * (tl.num_programs(0) // splits) + bg) * SINKS * D
    store_matrix(d_sink_k + at_sink, dk_SD, 0, SINKS, D)
    store_matrix(d_sink_v + at_sink, dv_SD, 0, SINKS, D)
