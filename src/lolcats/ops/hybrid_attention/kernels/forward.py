"""Forward pass: states before every chunk of 64 tokens, then outputs of every tile of 64 queries.

One launch writes the sum of phi_k(k)^T [v, 1] over every chunk, all at once; a scan adds the sums up along
the sequence, in place, so that each entry becomes the state before its chunk. S lies in memory as [B, S, N, F, D] in
the input type, z as [B, S, N, F] in float32 (N chunks; in a ragged batch B = 1, and chunks without a token hold zero).

Outputs: one program per tile of queries of one head. The window comes first, with a running maximum as in flash
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

from lolcats.ops.hybrid_attention.kernels.operands import SIZES, Operands, Rows, Sums, cdiv, in_log2, rows
from lolcats.ops.hybrid_attention.kernels.tiles import (
    _LOG2_E,
    FLOOR,
    before_window,
    dot,
    fade_sums,
    features,
    head_rows,
    in_window,
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

# Of the outputs, for rows of usual width, and for wide ones.
_TILES = ({"BN": 32, "num_warps": 4, "num_stages": 2, "maxnreg": 168}, {"BN": 32, "num_warps": 4, "num_stages": 1})
_SCAN_CHUNKS = 8  # per step of the loop
# As many as the threads of a program load at once: each thread then adds up its own columns, alone.
_SCAN_COLUMNS = 512
_SCAN_WARPS = 2


class States(NamedTuple):
    """S [B, S, N, F, D] (input type) and z [B, S, N, F] (float32), the sums before each of the N chunks (after it, of
    gradients)."""

    S: Tensor
    z: Tensor

    @classmethod
    def empty(cls, x: Operands) -> States:
        """Memory for them. S has the type of q, in float32 it would cost more traffic than q, k, v and y together; but
        the range of float16 is too small for sums over a sequence."""
        size = (x.lists[0], x.state_heads, x.lists[1], x.shape.F)
        dtype = torch.bfloat16 if x.q.dtype == torch.float16 else x.q.dtype
        S = x.q.new_empty((*size, x.shape.D), dtype=dtype)
        return cls(S, x.q.new_empty(size, dtype=torch.float32))


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


def forward(
    x: Operands, *, save: bool = False, target: Tensor | None = None, y: Rows | None = None
) -> tuple[Outputs, States | None]:
    """Outputs of all queries, in `y` if it is given, and the states, None without a linear part.

    target: [B, H, T, D], unit stride in D; for the error of the outputs instead of the outputs.
    """
    states = phi = None
    if x.shape.F:
        states = States.empty(x)
        if x.shape.INNER:  # outputs need features of keys, [B, S, N, C, F] in the input type
            phi = x.q.new_empty((*states.z.shape[:3], x.shape.C, x.shape.F))
        columns = 64 if x.wide else 128
        grid = (states.z.shape[:3].numel() * cdiv(x.shape.D, columns),)
        x.launch(
            state_kernel, grid, x.inputs, states, phi, *x.counts, shape=x.shape, BD=columns, num_warps=4, num_stages=1
        )
        scan_chunks(x, states, x.sums, reverse=False)
    out = Outputs(torch.empty_like(x.q) if y is None else y.x)
    if save:
        out = Outputs(out.y, x.empty_rows(), x.empty_rows(), x.empty_rows(dtype=torch.int32))
    if target is not None:
        out = out._replace(delta=x.empty_rows(), square=x.empty_rows())
    x.launch(
        output_kernel,
        x.tiles,
        x.inputs,
        states,
        phi,
        y or rows(out.y),
        rows(target),
        out,
        *x.counts,
        x.sinks_there,
        in_log2(x.scale),
        in_log2(x.softcap),
        CAP=x.config.linear_length_cap,
        shape=x.shape,
        **_TILES[x.wide],
    )
    return out, states


# States.


@triton.jit(do_not_specialize=SIZES)
def state_kernel(x, states, phi, tokens, chunks, kv_heads, shape: tl.constexpr, BD: tl.constexpr):
    """One program: one chunk of one state head, BD columns of v."""
    HALVES: tl.constexpr = shape.HALVES
    P: tl.constexpr = shape.P
    D: tl.constexpr = shape.D
    PB: tl.constexpr = shape.PB
    C: tl.constexpr = shape.C
    DBLOCKS: tl.constexpr = (D + BD - 1) // BD
    program = tl.program_id(0)
    column = program % DBLOCKS * BD
    at_chunk = (program // DBLOCKS).to(tl.int64)  # of [B * S * N]
    slot = program // DBLOCKS % chunks
    row = program // DBLOCKS // chunks  # of [B * S]
    heads = kv_heads * shape.SHARES
    head = row % heads
    g = head // shape.SHARES
    S = states.S + at_chunk * (shape.F * D)
    z = states.z + at_chunk * shape.F

    at = locate((row // heads).to(tl.int64), slot, x.layout, tokens)
    first = (slot - at.first_chunk) * C
    if x.layout.table is not None and first >= at.limit:
        # Nobody reads these states, but they are in an operator's output.
        for half in tl.static_range(HALVES):
            store_matrix(S + half * P * D, tl.zeros([PB, BD], tl.float32), column, P, D)
            if column == 0:
                store_vector(z + half * P, tl.zeros([PB], tl.float32), P)
        return
    first_position = position_of_entry_0(x.layout, at)
    k = head_rows(x.k, g, at)
    v = head_rows(x.v, g, at)
    # Keys from `end` on are in some window at the end of the sequence; no query sees them linearly.
    end = window_start(at.limit - 1, shape)
    entry = first + tl.arange(0, C)
    keep = entry < end
    if shape.SINKS > 0:
        keep = keep & (first_position + entry >= shape.SINKS)

    k_CD = load_rows(k.x, first, k.t, end, 0, D, C, shape.DB)
    v_CD = load_rows(v.x, first, v.t, end, column, D, C, BD)
    weight_DP = load_weight(x.maps.k_weight, head, k_CD.dtype, shape)
    halves = features(project(k_CD, weight_DP, x.maps.k_bias, head, shape), shape)
    for half in tl.static_range(HALVES):
        phi_CP = tl.where(keep[:, None], halves[half], 0.0)
        store_matrix(S + half * P * D, dot(tl.trans(phi_CP.to(v_CD.dtype)), v_CD), column, P, D)
        if column == 0:
            store_vector(z + half * P, tl.sum(phi_CP, 0), P)
            if phi is not None:
                store_rows(phi + at_chunk * (C * shape.F) + half * P, phi_CP, 0, shape.F, C, 0, P)


def scan_chunks(x: Operands, states: States, sums: Sums | None, *, reverse: bool) -> None:
    """Replace every chunk's own sum in `states` by that of all before it (after it, if `reverse`), from those in `sums`
    on, which get the ends; None: from zero."""
    _, heads, chunks, features, head_dim = states.S.shape
    segments = x.q.shape[0] if x.layout.table is None else x.layout.table.shape[0] - 1
    blocks = cdiv(features * head_dim, _SCAN_COLUMNS) + cdiv(features, _SCAN_COLUMNS)
    x.launch(
        scan_kernel,
        (segments * heads * blocks,),
        states,
        sums,
        x.layout,
        chunks,
        heads,
        segments * heads,
        0 if sums is None else sums.seen_N.shape[0],
        REVERSE=reverse,
        shape=x.shape,
        CHUNKS=_SCAN_CHUNKS,
        COLUMNS=_SCAN_COLUMNS,
        num_warps=_SCAN_WARPS,
    )


@triton.jit
def _scan_block(
    entries,
    ends,  # of `sums`, the rows of S or z
    sums,
    program,
    layout,
    chunks,
    heads,
    sequences,
    REVERSE: tl.constexpr,
    shape: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS columns of the [chunks, WIDTH] matrix of one sequence and head."""
    BLOCKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    row = (program // BLOCKS).to(tl.int64)
    count = chunks
    if layout.table is not None:
        place = sequence(row // heads, layout, chunks)
        joined = tl.load(layout.table + row // heads * 5 + 4)
        entries += (row % heads * chunks + place.first_chunk - tl.maximum(joined, 0)) * WIDTH
        count = tl.where(joined < 0, 0, tl.cdiv(place.limit, shape.C) + joined)
    else:
        entries += row * chunks * WIDTH
    at = program % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    real = at < WIDTH
    total = tl.zeros([COLUMNS], tl.float32)
    if sums is not None:
        n = row // heads
        has_end = (n < sequences) & (joined >= 0)  # else it is padding, or the next program writes the end
        ends_head = ends.x + row % heads // shape.SHARES * ends.h + row % heads % shape.SHARES * WIDTH + at
        begins = has_end & (tl.load(sums.seen_N + n, mask=has_end, other=0) > 0)
        page = tl.load(sums.page_2N[0] + n, mask=begins, other=0).to(tl.int64)
        total += tl.load(ends_head + page * ends.b, mask=at < tl.where(begins, WIDTH, 0), other=0.0)
        before_page = tl.load(sums.page_2N[1] + n - 1, mask=has_end & (joined > 0), other=0).to(tl.int64)
        page = tl.load(sums.page_2N[1] + n, mask=has_end, other=0).to(tl.int64)
    for chunk in tl.range(0, count, CHUNKS):
        index = chunk + tl.arange(0, CHUNKS)
        mask = (index < count)[:, None] & real[None, :]
        if REVERSE:
            address = entries + (count - 1 - index).to(tl.int64)[:, None] * WIDTH + at[None, :]
            earlier = address + WIDTH
        else:
            address = entries + index.to(tl.int64)[:, None] * WIDTH + at[None, :]
            earlier = address - WIDTH
        own = tl.load(address, mask=mask, other=0.0).to(tl.float32)
        # Sums without the own entry: the difference of two sums with it would lose all where that entry is huge, as a
        # query's features over a clamped denominator are.
        previous = tl.load(earlier, mask=mask & (index > chunk)[:, None], other=0.0).to(tl.float32)
        tl.debug_barrier()  # all is read
        before = total[None, :] + tl.cumsum(previous, 0)
        tl.store(address, before.to(entries.dtype.element_ty), mask=mask)
        if sums is not None:  # the end of the segment before, which this one continues
            middle = (index == tl.where(has_end & (joined > 0), joined, -1))[:, None] & real[None, :]
            tl.store((ends_head + before_page * ends.b)[None, :] + 0 * index[:, None], before, mask=middle)
        total += tl.sum(own, 0)
    if sums is not None:
        tl.store(ends_head + page * ends.b, total, mask=at < tl.where(has_end, WIDTH, 0))


@triton.jit(do_not_specialize=SIZES)
def scan_kernel(
    states,
    sums,  # `Sums`
    layout,
    chunks,
    heads,  # that have a state
    rows,
    sequences,
    REVERSE: tl.constexpr,
    shape: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The first programs take S, the others z."""
    WIDTH: tl.constexpr = shape.F * shape.D
    BLOCKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    S, z, end_S, end_z = states.S, states.z, None, None
    if sums is not None:
        end_S, end_z = sums.S, sums.z
    at_z = program - rows * BLOCKS
    if at_z < 0:
        _scan_block(S, end_S, sums, program, layout, chunks, heads, sequences, REVERSE, shape, WIDTH, CHUNKS, COLUMNS)
    else:
        _scan_block(z, end_z, sums, at_z, layout, chunks, heads, sequences, REVERSE, shape, shape.F, CHUNKS, COLUMNS)


# Outputs.


@triton.jit
def _add_keys(q_MD, keep, k_ND, v_ND, index, acc, total, top, arg, scale, softcap, SAVE: tl.constexpr):
    """Running softmax sums after one more tile of keys, and which of all keys has the largest score."""
    score = tl.where(keep, scaled_scores(dot(q_MD, tl.trans(k_ND)), scale, softcap), float("-inf"))
    if SAVE:  # the first of the largest scores
        tile_top = tl.max(score, 1)
        at_top = (score == tile_top[:, None]) & keep
        tile_arg = tl.min(tl.where(at_top, index[None, :], 2147483647), 1)
        arg = tl.where(tile_top > top, tile_arg, arg)
    top, finite_top, fade = fade_sums(top, tl.max(score, 1))
    weight = tl.exp2(score - finite_top[:, None])
    total = total * fade + tl.sum(weight, 1)
    acc = dot(weight.to(v_ND.dtype), v_ND, acc * fade[:, None])
    return acc, total, top, arg


@triton.jit(do_not_specialize=SIZES)
def output_kernel(
    x,  # `Inputs`
    states,
    phi,  # features of the keys
    y,
    target,
    out,
    tokens,
    chunks,
    kv_heads,
    sinks_there,
    scale,  # of the scores, times log2(e)
    softcap,  # of the scores, times log2(e), or None
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
    SAVE: tl.constexpr = out.den is not None
    ERROR: tl.constexpr = target.x is not None
    tile = query_tile(x.layout, tokens, chunks, kv_heads, shape)
    at = tile.at
    first = tile.first
    limit = at.limit
    row = first + tl.arange(0, C)
    head, shift, asked, end = tile.h, 0, None, at.cells
    if x.layout.queries is not None:
        place = x.layout.queries + at.n * 2
        asked = tl.load(place + 1, mask=first < limit, other=limit)
        if (first + C <= asked) | (first >= limit):
            return
        shift, end = tl.load(place) - at.first_token, limit
        if x.layout.heads is not None:
            head = tl.load(x.layout.heads + tile.g) * shape.REPEATS + head % shape.REPEATS
    q = head_rows(x.q, head, at)
    y = head_rows(y, head, at)
    if x.layout.queries is None and x.layout.table is not None and first >= limit:
        store_rows(y.x, tl.zeros([C, DB], tl.float32), first, y.t, at.cells, 0, D)
        if ERROR:
            tl.store(out.square + tile.at_first + row, tl.zeros([C], tl.float32), mask=row < at.cells)
        return
    k = head_rows(x.k, tile.g, at)
    v = head_rows(x.v, tile.g, at)
    first_position = position_of_entry_0(x.layout, at)
    start = window_start(row, shape)
    first_start = window_start(first, shape)
    last = tl.minimum(first + C, limit)

    q_MD = load_rows(q.x + shift * q.t, first, q.t, limit, 0, D, C, DB, asked)
    acc = tl.zeros([C, DB], tl.float32)
    total = tl.zeros([C], tl.float32)
    top = tl.full([C], float("-inf"), tl.float32)
    arg = tl.full([C], -1 - shape.SB, tl.int32)  # none
    if x.sink_logits is not None:
        top = total + tl.load(x.sink_logits + tile.h).to(tl.float32) * _LOG2_E
        total += 1.0

    if shape.SINKS > 0:
        k_SD, v_SD, sink, sink_keep = load_sinks(x.sink_k, x.sink_v, tile, row, first_position, sinks_there, shape)
        acc, total, top, arg = _add_keys(
            q_MD, sink_keep, k_SD, v_SD, -1 - sink, acc, total, top, arg, scale, softcap, SAVE
        )
    if shape.W > 0:
        for key in tl.range(first_start, last, BN):
            k_ND, v_ND, index = load_keys(k, v, key, limit, shape, BN)
            keep = in_window(index, row, start, first_position, shape)
            acc, total, top, arg = _add_keys(q_MD, keep, k_ND, v_ND, index, acc, total, top, arg, scale, softcap, SAVE)
    if shape.W > 0 or shape.SINKS > 0:
        factor = tl.sigmoid(tl.load(x.window_factor + tile.h).to(tl.float32))
        if CAP > 0:
            factor = factor * tl.maximum((first_position + row + 1).to(tl.float32) / CAP, 1.0)
            acc = acc * factor[:, None]
        else:
            acc = acc * factor
        total = total * factor

    if shape.MAP != "none":
        s = tile.h // (shape.REPEATS // shape.SHARES)
        weight_DP = load_weight(x.maps.q_weight, tile.h, q_MD.dtype, shape)
        q_halves = features(project(q_MD, weight_DP, x.maps.q_bias, tile.h, shape), shape)
        chunk = first_start // C
        at_state = (tile.list_row * kv_heads * shape.SHARES + s) * chunks + at.first_chunk + chunk
        S = states.S + at_state * (shape.F * D)
        z = states.z + at_state * shape.F
        for half in tl.static_range(HALVES):
            S_PD = load_matrix(S + half * P * D, 0, P, D, shape.PB, DB)
            acc = dot(q_halves[half].to(S_PD.dtype), S_PD, acc)
            total += tl.sum(q_halves[half] * load_vector(z + half * P, P, shape.PB)[None, :], 1)
        if shape.INNER:  # keys between the state and the windows
            phi += at_state * (C * shape.F)
            inner = window_start(last - 1, shape)
            for key in tl.range(chunk * C, inner, BN, num_stages=1):  # more would cost a program of a multiprocessor
                index = key + tl.arange(0, BN)
                v_ND = load_rows(v.x, key, v.t, limit, 0, D, BN, DB)
                weight = tl.zeros([C, BN], tl.float32)
                for half in tl.static_range(HALVES):
                    k_NP = load_rows(phi + half * P, key - chunk * C, shape.F, inner - chunk * C, 0, P, BN, shape.PB)
                    weight = dot(q_halves[half].to(k_NP.dtype), tl.trans(k_NP), weight)
                weight = tl.where(before_window(index, start, first_position, shape), weight, 0.0)
                total += tl.sum(weight, 1)
                acc = dot(weight.to(v_ND.dtype), v_ND, acc)

    result = acc * (1.0 / tl.maximum(total, FLOOR))[:, None]
    result = tl.where((row < limit)[:, None], result, 0.0)
    at_row = tile.at_first + row
    if ERROR:
        target = head_rows(target, tile.h, at)
        error = result - load_rows(target.x, first, target.t, limit, 0, D, C, DB).to(tl.float32)
        tl.store(out.square + at_row, tl.sum(error * error, 1), mask=row < at.cells)
        delta = tl.where(total >= FLOOR, -tl.sum(error * result, 1), 0.0)  # a clamped denominator is constant
        tl.store(out.delta + at_row, delta, mask=row < at.cells)
        result = error
    store_rows(y.x + shift * y.t, result, first, y.t, end, 0, D, asked)
    if SAVE:
        tl.store(out.den + at_row, total, mask=row < limit)
        tl.store(out.arg + at_row, arg, mask=row < limit)
        tl.store(out.top + at_row, top, mask=row < limit)
