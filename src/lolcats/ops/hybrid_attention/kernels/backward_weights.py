"""Gradients that are sums over all tokens: of the feature maps' weights and of the sinks, see `backward`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.backward_window import WindowGradients
from lolcats.ops.hybrid_attention.kernels.launch import INTERPRETED, SIZES, cdiv
from lolcats.ops.hybrid_attention.kernels.shape import STATE_CHUNK, Operands, padded, rows
from lolcats.ops.hybrid_attention.kernels.tiles import (
    dot,
    head_rows,
    load_rows,
    locate,
    sequence,
    store_matrix,
    store_vector,
)

# Programs that share the tokens of a sum over all of them: on an H200 four, or two, per multiprocessor.
_WEIGHT_PROGRAMS = 2 if INTERPRETED else 528
_SINK_PROGRAMS = 2 if INTERPRETED else 264


def weight_gradients(operands: Operands, x: Tensor, dx: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, G, T, D] (q or k of the operands) and dx [B, S, T, P] (contiguous; S a multiple of G): [S, D, P] and
    [S, P] in float32.

    Each program adds up a share of the tokens; the shares are added afterwards, so that results do not depend on
    the order in which programs run.
    """
    heads = dx.shape[1]
    tiles = operands.sizes.chunk_rows * operands.sizes.chunks
    splits = max(min(cdiv(_WEIGHT_PROGRAMS, heads), tiles), 1)
    d_weight = torch.empty(splits, heads, x.shape[3], dx.shape[3], device=x.device, dtype=torch.float32)
    d_bias = torch.empty(splits, heads, dx.shape[3], device=x.device, dtype=torch.float32)
    weight_gradient_kernel[(heads * splits,)](
        rows(x),
        dx,
        operands.layout,
        d_weight,
        d_bias,
        operands.sizes.tokens,
        operands.sizes.chunks,
        heads,
        tiles,
        splits,
        shape=operands.shape,
        SHARING=heads // x.shape[1],
        PB=padded(dx.shape[3]),
        **({"num_warps": 8, "num_stages": 2} if operands.shape.WIDE else {"num_warps": 4, "num_stages": 5}),
    )
    return d_weight.sum(0), d_bias.sum(0)


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
        at = locate(tl.cast(tile // chunks, tl.int64), slot, layout, tokens, shape)
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
    assert x.sink_v is not None
    tiles = cdiv(x.sizes.tokens, STATE_CHUNK)
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
        x.sizes.tokens,
        kv_heads,
        splits,
        shape=x.shape,
        num_warps=4,
        num_stages=1,
    )
    d_sink_k, d_sink_v = (share[:, :, :, :there].sum(0) for share in (d_sink_k, d_sink_v))
    return d_sink_k.to(x.sink_k.dtype), d_sink_v.to(x.sink_v.dtype)


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
    at = sequence(bg // kv_heads, layout, tokens, shape)
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
