"""Forward pass: states before every chunk of 64 tokens (`forward_states`), then outputs of every tile of 64 queries.

One program per tile of queries of one head. The window comes first, with a running maximum as in flash
attention; c_n is the final maximum. Then the same accumulator, times gamma, takes the linear part: the stored state
before the tile's first window, and, where the tile's queries do not share one window start, the keys between that
state and each query's window, whose features the first launch has written for all query heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.forward_states import States, chunk_states, empty_features
from lolcats.ops.hybrid_attention.kernels.launch import SIZES
from lolcats.ops.hybrid_attention.kernels.shape import Operands, in_log2, rows
from lolcats.ops.hybrid_attention.kernels.tiles import (
    _FLOOR,
    add_scores,
    before_window,
    dot,
    features,
    head_rows,
    in_window,
    load_keys,
    load_matrix,
    load_rows,
    load_sinks,
    load_vector,
    load_weight,
    position_of_entry_0,
    project,
    query_tile,
    scaled_scores,
    sink_logit,
    store_rows,
    window_start,
)

# For rows of usual width, and for wide ones.
_TILES = (
    {"BN": 32, "num_warps": 4, "num_stages": 2, "maxnreg": 168},
    {"BN": 32, "num_warps": 4, "num_stages": 1},
)


class Outputs(NamedTuple):
    """y [B, H, T, D] and, where they were saved, what the backward pass needs of every row: den, the
    denominator; top, c_n times log2(e), both float32 [B, H, T]; arg, int32, the entry of the maximal key, or
    -1 - i for sink i; -1 - SB where no key is, because the sink logit is larger.

    Against a target y holds the error, output minus target; delta minus its product with the output (zero where
    the denominator is clamped); square the sum of its squares; both float32 [B, H, T]. Otherwise these are None."""

    y: Tensor
    den: Tensor | None = None
    top: Tensor | None = None
    arg: Tensor | None = None
    delta: Tensor | None = None
    square: Tensor | None = None


def forward(x: Operands, *, save: bool = False, target: Tensor | None = None) -> tuple[Outputs, States]:
    """Outputs and states, see `attend`; the states are None without a linear part."""
    phi = empty_features(x)
    states = chunk_states(x, phi) if x.is_linear else None
    return attend(x, states, phi, save=save, target=target), states or States(*[None] * 4)  # type: ignore[arg-type]


def attend(
    x: Operands, states: States | None, phi: Tensor | None, *, save: bool, target: Tensor | None = None
) -> Outputs:
    """Outputs of all queries, from the states before every chunk (None without a linear part) and the keys' features.

    target: [B, H, T, D], unit stride in D; for the error of the outputs instead of the outputs.
    """
    out = Outputs(torch.empty_like(x.q))
    if save:
        out = Outputs(out.y, x.empty_rows(), x.empty_rows(), x.empty_rows(dtype=torch.int32))
    if target is not None:
        out = out._replace(delta=x.empty_rows(), square=x.empty_rows())
    tiles = (x.sizes.chunk_rows * x.q.shape[1] * x.sizes.chunks,)
    output_kernel[tiles](
        rows(x.q),
        rows(x.k),
        rows(x.v),
        rows(x.sink_k),
        rows(x.sink_v),
        x.maps,
        x.gamma,
        x.sink_logits,
        states,
        phi,
        x.layout,
        rows(out.y),
        rows(target),
        out,
        *x.counts,
        x.sizes.sinks_there,
        in_log2(x.scale),
        in_log2(x.softcap),
        SAVE=save,
        ERROR=target is not None,
        CAP=x.config.linear_length_cap,
        shape=x.shape,
        **_TILES[x.shape.WIDE],
    )
    return out


@triton.jit
def _add_keys(q_MD, keep, k_ND, v_ND, index, acc, total, top, arg, scale, softcap, SAVE: tl.constexpr):
    """Running softmax sums after one more tile of keys, and which of all keys has the largest score."""
    score = tl.where(keep, scaled_scores(dot(q_MD, tl.trans(k_ND)), scale, softcap), float("-inf"))
    if SAVE:  # the first of the largest scores
        tile_top = tl.max(score, 1)
        at_top = (score == tile_top[:, None]) & keep
        tile_arg = tl.min(tl.where(at_top, index[None, :], 2147483647), 1)
        arg = tl.where(tile_top > top, tile_arg, arg)
    acc, total, top = add_scores(score, v_ND, acc, total, top)
    return acc, total, top, arg


@triton.jit(do_not_specialize=SIZES)
def output_kernel(
    q,
    k,
    v,
    sink_k,
    sink_v,
    maps,
    gamma,
    sink_logits,
    states,
    phi,  # of the keys, see `empty_features`
    layout,
    y,
    target,
    out,
    tokens,
    chunks,
    kv_heads,
    sinks_there,
    scale,  # of the scores, times log2(e)
    softcap,  # of the scores, times log2(e), or None
    SAVE: tl.constexpr,
    ERROR: tl.constexpr,
    CAP: tl.constexpr,  # the linear length cap
    shape: tl.constexpr,
    BN: tl.constexpr,
):
    """One program: C queries of one head."""
    HALVES: tl.constexpr = shape.HALVES
    P: tl.constexpr = shape.P
    D: tl.constexpr = shape.D
    DB: tl.constexpr = shape.DB
    C: tl.constexpr = shape.C
    tile = query_tile(layout, tokens, chunks, kv_heads, shape)
    at = tile.at
    first = tile.first
    limit = at.limit
    row = first + tl.arange(0, C)
    y = head_rows(y, tile.h, at)
    if shape.RAGGED and first >= limit:
        store_rows(y.x, tl.zeros([C, DB], tl.float32), first, y.t, at.cells, 0, D)
        if ERROR:
            tl.store(out.square + tile.at_first + row, tl.zeros([C], tl.float32), mask=row < at.cells)
        return
    q = head_rows(q, tile.h, at)
    k = head_rows(k, tile.g, at)
    v = head_rows(v, tile.g, at)
    first_position = position_of_entry_0(layout, at, shape)
    start = window_start(row, shape)
    first_start = window_start(first, shape)
    last = tl.minimum(first + C, limit)

    q_MD = load_rows(q.x, first, q.t, limit, 0, D, C, DB)
    acc = tl.zeros([C, DB], tl.float32)
    total = tl.zeros([C], tl.float32)
    top = tl.full([C], float("-inf"), tl.float32)
    arg = tl.full([C], -1 - shape.SB, tl.int32)  # none
    if sink_logits is not None:
        top = total + sink_logit(sink_logits, tile.h)
        total += 1.0

    if shape.SINKS > 0:
        k_SD, v_SD, sink, sink_keep = load_sinks(sink_k, sink_v, tile, row, first_position, sinks_there, shape)
        acc, total, top, arg = _add_keys(
            q_MD, sink_keep, k_SD, v_SD, -1 - sink, acc, total, top, arg, scale, softcap, SAVE
        )
    if shape.W > 0:
        for key in tl.range(first_start, last, BN):
            k_ND, v_ND, index = load_keys(k, v, key, limit, shape, BN)
            keep = in_window(index, row, start, first_position, shape)
            acc, total, top, arg = _add_keys(q_MD, keep, k_ND, v_ND, index, acc, total, top, arg, scale, softcap, SAVE)
    if shape.W > 0 or shape.SINKS > 0:
        factor = tl.load(gamma + tile.h).to(tl.float32)
        if CAP > 0:
            factor = factor * tl.maximum((first_position + row + 1).to(tl.float32) / CAP, 1.0)
            acc = acc * factor[:, None]
        else:
            acc = acc * factor
        total = total * factor

    if shape.MAP != "none":
        s = tile.h // (shape.REPEATS // shape.SHARES)
        weight_DP = load_weight(maps.q_weight, tile.h, q_MD.dtype, shape)
        q_halves = features(project(q_MD, weight_DP, maps.q_bias, tile.h, shape), shape)
        chunk = first_start // C
        at_state = (tile.list_row * kv_heads * shape.SHARES + s) * chunks + at.first_chunk + chunk
        S = states.prefix_S + at_state * (shape.F * D)
        z = states.prefix_z + at_state * shape.F
        for half in tl.static_range(HALVES):
            S_PD = load_matrix(S + half * P * D, 0, P, D, shape.PB, DB)
            acc = dot(q_halves[half].to(S_PD.dtype), S_PD, acc)
            total += tl.sum(q_halves[half] * load_vector(z + half * P, P, shape.PB)[None, :], 1)
        if shape.INNER:  # keys between the state and the windows
            phi += at_state * (C * shape.F)
            end = window_start(last - 1, shape)
            for key in tl.range(chunk * C, end, BN, num_stages=1):  # more would cost a program of a multiprocessor
                index = key + tl.arange(0, BN)
                v_ND = load_rows(v.x, key, v.t, limit, 0, D, BN, DB)
                weight = tl.zeros([C, BN], tl.float32)
                for half in tl.static_range(HALVES):
                    k_NP = load_rows(phi + half * P, key - chunk * C, shape.F, end - chunk * C, 0, P, BN, shape.PB)
                    weight = dot(q_halves[half].to(k_NP.dtype), tl.trans(k_NP), weight)
                weight = tl.where(before_window(index, start, first_position, shape), weight, 0.0)
                total += tl.sum(weight, 1)
                acc = dot(weight.to(v_ND.dtype), v_ND, acc)

    result = acc * (1.0 / tl.maximum(total, _FLOOR))[:, None]
    result = tl.where((row < limit)[:, None], result, 0.0)
    at_row = tile.at_first + row
    if ERROR:
        target = head_rows(target, tile.h, at)
        error = result - load_rows(target.x, first, target.t, limit, 0, D, C, DB).to(tl.float32)
        tl.store(out.square + at_row, tl.sum(error * error, 1), mask=row < at.cells)
        delta = tl.where(total >= _FLOOR, -tl.sum(error * result, 1), 0.0)  # a clamped denominator is constant
        tl.store(out.delta + at_row, delta, mask=row < at.cells)
        result = error
    store_rows(y.x, result, first, y.t, at.cells, 0, D)
    if SAVE:
        tl.store(out.den + at_row, total, mask=row < limit)
        tl.store(out.arg + at_row, arg, mask=row < limit)
        tl.store(out.top + at_row, top, mask=row < limit)
