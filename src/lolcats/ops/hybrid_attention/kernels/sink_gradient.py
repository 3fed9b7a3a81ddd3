"""Backward pass of the sinks: every query of the sequence sees them, so programs add up shares of the queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.common import INTERPRETED
from lolcats.ops.hybrid_attention.kernels.common import LOG2_E
from lolcats.ops.hybrid_attention.kernels.common import Operands
from lolcats.ops.hybrid_attention.kernels.common import dot
from lolcats.ops.hybrid_attention.kernels.common import load_rows
from lolcats.ops.hybrid_attention.kernels.common import or_dummy
from lolcats.ops.hybrid_attention.kernels.common import padded
from lolcats.ops.hybrid_attention.kernels.common import sequence
from lolcats.ops.hybrid_attention.kernels.common import store_matrix
from lolcats.ops.hybrid_attention.kernels.common import strides
from lolcats.ops.hybrid_attention.kernels.common import tuned
from lolcats.ops.hybrid_attention.kernels.key_gradient import load_queries
from lolcats.ops.hybrid_attention.kernels.outputs import Outputs
from lolcats.ops.hybrid_attention.kernels.query_gradient import RowGradients

_PROGRAMS = 2 if INTERPRETED else 264
_CONFIGS = ({"warps": 4, "stages": 1}, {"warps": 4, "stages": 2})
_WIDE = ({"warps": 4, "stages": 1},)


def sink_gradients(operands: Operands, out: Outputs, rows: RowGradients, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of sink_k and sink_v, in their shapes and types."""
    x = operands
    assert x.sink_k is not None
    assert x.sink_v is not None
    constants = x.constants()
    tiles = triton.cdiv(x.tokens, constants["C"])
    sequences, there = x.sink_k.shape[0], x.sink_k.shape[2]
    splits = max(min(triton.cdiv(_PROGRAMS, sequences * x.kv_heads), tiles), 1)
    shape = (splits, sequences, x.kv_heads, x.spec.sinks, x.head_dim)
    d_sink_k, d_sink_v = (torch.empty(shape, device=x.q.device, dtype=torch.float32) for _ in range(2))
    sink_gradient_kernel(x.head_dim, x.q.dtype)[(sequences * x.kv_heads * splits,)](
        x.q,
        x.sink_k,
        x.sink_v,
        dy,
        x.gamma,
        or_dummy(x.length, x.q),
        or_dummy(x.base, x.q),
        or_dummy(x.table, x.q),
        out.den,
        out.top,
        out.arg,
        rows.delta,
        rows.total,
        d_sink_k,
        d_sink_v,
        *strides(x.q),
        *strides(x.sink_k),
        *strides(x.sink_v),
        *strides(dy),
        x.tokens,
        there,
        splits,
        x.scale,
        x.scale * LOG2_E,
        SB=padded(x.spec.sinks),
        **constants,
    )
    d_sink_k, d_sink_v = (share[:, :, :, :there].sum(0) for share in (d_sink_k, d_sink_v))
    return d_sink_k.to(x.sink_k.dtype), d_sink_v.to(x.sink_v.dtype)


@tuned(_CONFIGS, _WIDE)
def sink_gradient_kernel(
    q,
    sink_k,
    sink_v,
    dy,
    gamma,
    length,
    base,
    table,
    den,
    top,
    arg,
    delta,
    total,
    d_sink_k,
    d_sink_v,
    q_b,
    q_h,
    q_t,
    sk_b,
    sk_g,
    sk_t,
    sv_b,
    sv_g,
    sv_t,
    dy_b,
    dy_h,
    dy_t,
    tokens,
    sinks_there,
    splits,
    scale,
    scale_log2,
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
):
    """One program: every `splits`-th tile of the queries of one key/value head."""
    REPEATS: tl.constexpr = HEADS // KV_HEADS
    program = tl.program_id(0)
    split = program % splits
    bg = program // splits
    n = (bg // KV_HEADS).to(tl.int64)
    g = bg % KV_HEADS
    b, first_token, _, limit, _ = sequence(n, length, table, tokens, HAS_LENGTH, RAGGED)
    first_position = 0
    if HAS_BASE:
        first_position = tl.load(base + n)
    q += b * q_b + first_token * q_t
    dy += b * dy_b + first_token * dy_t
    sink = tl.arange(0, SB)
    k_SD = load_rows(sink_k + n * sk_b + g * sk_g, split * 0, sk_t, sinks_there, 0, D, SB, DB)
    v_SD = load_rows(sink_v + n * sv_b + g * sv_g, split * 0, sv_t, sinks_there, 0, D, SB, DB)
    dk_SD = tl.zeros([SB, DB], tl.float32)
    dv_SD = tl.zeros([SB, DB], tl.float32)
    for item in tl.range(split, tl.cdiv(limit, C) * REPEATS, splits):
        h = g * REPEATS + item % REPEATS
        begin = item // REPEATS * C
        row = begin + tl.arange(0, C)
        real = row < limit
        at = (b * HEADS + h) * tokens + first_token
        q_MD, g_MD, delta_M = load_queries(
            q + h * q_h, dy + h * dy_h, den + at, delta + at, begin, q_t, dy_t, limit, D, C, DB
        )
        top_M = tl.load(top + at + row, mask=real, other=0.0)
        arg_M = tl.load(arg + at + row, mask=real, other=0)
        total_M = tl.load(total + at + row, mask=real, other=0.0)
        factor = tl.load(gamma + h).to(tl.float32)
        keep = (sink < sinks_there)[:, None] & (sink[:, None] <= first_position + row[None, :]) & real[None, :]
        score_SM = dot(k_SD, tl.trans(q_MD)) * scale_log2
        weight_SM = tl.where(keep, factor * tl.exp2(score_SM - top_M[None, :]), 0.0)
        dv_SD = dot(weight_SM.to(g_MD.dtype), g_MD, dv_SD)
        ds_SM = weight_SM * (dot(v_SD, tl.trans(g_MD)) + delta_M[None, :])
        ds_SM -= tl.where((-1 - sink)[:, None] == arg_M[None, :], (factor * total_M)[None, :], 0.0)
        dk_SD = dot(ds_SM.to(q_MD.dtype), q_MD, dk_SD)
    at_sink = (split * (tl.num_programs(0) // splits) + bg) * SINKS * D
    store_matrix(d_sink_k + at_sink, dk_SD * scale, 0, SINKS, D)
    store_matrix(d_sink_v + at_sink, dv_SD, 0, SINKS, D)
