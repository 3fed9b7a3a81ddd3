"""States before every chunk of 64 tokens, and after all keys that have left the window.

One launch writes the sum of phi_k(k)^T [v, 1] over every chunk, all at once; a scan adds the sums up along
the sequence, in place, so that each entry becomes the state before its chunk. S lies in memory as [B, S, N, F, D] in
the input type, z as [B, S, N, F] in float32 (N chunks; in a ragged batch B = 1, and chunks without a token hold zero).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.launch import SIZES, cdiv
from lolcats.ops.hybrid_attention.kernels.shape import Operands, rows
from lolcats.ops.hybrid_attention.kernels.tiles import (
    dot,
    features,
    head_rows,
    load_rows,
    load_weight,
    locate,
    position_of_entry_0,
    project,
    sequence,
    store_matrix,
    store_rows,
    store_vector,
    window_start,
)

_SCAN_CHUNKS = 8  # per step of the loop
# As many as the threads of a program load at once: each thread then adds up its own columns, alone.
_SCAN_COLUMNS = 512
_SCAN_WARPS = 2


class States(NamedTuple):
    """prefix_S [B, S, N, F, D] (input type) and prefix_z [B, S, N, F] (float32), the state before each of the N
    chunks; final_S [sequences, S, F, D] and final_z [sequences, S, F], float32, after all keys that left the window;
    None for no sequences."""

    prefix_S: Tensor
    prefix_z: Tensor
    final_S: Tensor | None
    final_z: Tensor | None


def empty_features(x: Operands) -> Tensor | None:
    """Memory for the features of all keys, [B, S, N, C, F] in the input type, if outputs need any of them."""
    if not (x.is_linear and x.shape.INNER):
        return None
    *chunks, features, _ = x.sizes.size_S
    return x.q.new_empty((*chunks, x.shape.C, features))


def chunk_states(x: Operands, phi: Tensor | None = None) -> States:
    """The states before every chunk, and after all keys that have left the window; `phi`: see `empty_features`."""
    S, z = x.empty_states()
    columns = 64 if x.shape.WIDE else 128
    state_kernel[(z.shape[:3].numel() * cdiv(x.shape.D, columns),)](
        rows(x.k),
        rows(x.v),
        x.maps,
        x.layout,
        S,
        z,
        phi,
        *x.counts,
        shape=x.shape,
        BD=columns,
        num_warps=4,
        num_stages=1,
    )
    return States(S, z, *scan_chunks(x, S, z, x.S, x.z, reverse=False))


@triton.jit(do_not_specialize=SIZES)
def state_kernel(k, v, maps, layout, S, z, phi, tokens, chunks, kv_heads, shape: tl.constexpr, BD: tl.constexpr):
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
    S += at_chunk * (shape.F * D)
    z += at_chunk * shape.F

    at = locate((row // heads).to(tl.int64), slot, layout, tokens, shape)
    first = (slot - at.first_chunk) * C
    if shape.RAGGED and first >= at.limit:  # nobody reads these states, but they are in an operator's output
        for half in tl.static_range(HALVES):
            store_matrix(S + half * P * D, tl.zeros([PB, BD], tl.float32), column, P, D)
            if column == 0:
                store_vector(z + half * P, tl.zeros([PB], tl.float32), P)
        return
    first_position = position_of_entry_0(layout, at, shape)
    k = head_rows(k, g, at)
    v = head_rows(v, g, at)
    # Keys from `end` on are in some window at the end of the sequence; no query sees them linearly.
    end = window_start(at.limit - 1, shape)
    entry = first + tl.arange(0, C)
    keep = entry < end
    if shape.SINKS > 0:
        keep = keep & (first_position + entry >= shape.SINKS)

    k_CD = load_rows(k.x, first, k.t, end, 0, D, C, shape.DB)
    v_CD = load_rows(v.x, first, v.t, end, column, D, C, BD)
    weight_DP = load_weight(maps.k_weight, head, k_CD.dtype, shape)
    halves = features(project(k_CD, weight_DP, maps.k_bias, head, shape), shape)
    for half in tl.static_range(HALVES):
        phi_CP = tl.where(keep[:, None], halves[half], 0.0)
        store_matrix(S + half * P * D, dot(tl.trans(phi_CP.to(v_CD.dtype)), v_CD), column, P, D)
        if column == 0:
            store_vector(z + half * P, tl.sum(phi_CP, 0), P)
            if phi is not None:
                store_rows(phi + at_chunk * (C * shape.F) + half * P, phi_CP, 0, shape.F, C, 0, P)


def scan_chunks(
    x: Operands, S: Tensor, z: Tensor, first_S: Tensor | None, first_z: Tensor | None, *, reverse: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Replace every chunk's entry by the sum of the entries before it (after it, if `reverse`), in place.

    Args:
        x: of the call; it says which chunks form a sequence.
        S: [B, S, N, F, D] of N chunks, any floating type; z: [B, S, N, F], float32; both contiguous. B = 1 in a
            ragged batch.
        first_S, first_z: [sequences, S, F, D] and [sequences, S, F], float32, where the sums begin; None: zero.

    Returns:
        The sums of everything, in the shapes of first_S and first_z; float32. None for no sequences.
    """
    _, heads, chunks, features, head_dim = S.shape
    count, width = x.sizes.segments * heads, features * head_dim
    end_S = end_z = None
    if x.sequences:
        end_S = S.new_empty((x.sequences, heads, features, head_dim), dtype=torch.float32)
        end_z = S.new_empty((x.sequences, heads, features), dtype=torch.float32)
    blocks = cdiv(width, _SCAN_COLUMNS) + cdiv(features, _SCAN_COLUMNS)
    scan_kernel[(count * blocks,)](
        S,
        z,
        first_S,
        first_z,
        end_S,
        end_z,
        x.layout,
        chunks,
        heads,
        count,
        x.sequences,
        REVERSE=reverse,
        shape=x.shape,
        CHUNKS=_SCAN_CHUNKS,
        COLUMNS=_SCAN_COLUMNS,
        num_warps=_SCAN_WARPS,
    )
    return end_S, end_z


@triton.jit
def _chunks_of(row, layout, chunks, heads, shape):
    """Where the entries of one sequence and head begin, and how many there are."""
    if shape.RAGGED:
        at = sequence(row // heads, layout, chunks, shape)
        return row % heads * chunks + at.first_chunk, tl.cdiv(at.limit, shape.C)
    else:
        return row * chunks, chunks


@triton.jit
def _scan_block(
    entries,
    first,
    end,
    row,
    column,
    layout,
    chunks,
    heads,
    known,  # whether there are a first and an end
    REVERSE: tl.constexpr,
    shape: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of the [chunks, WIDTH] matrix of one sequence and head."""
    begin, count = _chunks_of(row, layout, chunks, heads, shape)
    entries += begin * WIDTH
    at = column + tl.arange(0, COLUMNS)
    real = at < WIDTH
    at_end = at < tl.where(known, WIDTH, 0)
    total = tl.zeros([COLUMNS], tl.float32)
    if first is not None:
        first += row * WIDTH
        total += tl.load(first + at, mask=at_end, other=0.0)
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
        total += tl.sum(own, 0)
    if end is not None:
        tl.store(end + row * WIDTH + at, total, mask=at_end)


@triton.jit(do_not_specialize=["chunks", "heads", "rows", "sequences"])
def scan_kernel(
    S,
    z,
    first_S,
    first_z,
    end_S,
    end_z,
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
    """The first programs take S, the others z; one takes COLUMNS columns of one sequence and head."""
    WIDTH: tl.constexpr = shape.F * shape.D
    BLOCKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    Z_BLOCKS: tl.constexpr = (shape.F + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    if program < rows * BLOCKS:
        row = (program // BLOCKS).to(tl.int64)
        column = program % BLOCKS * COLUMNS
        known = row // heads < sequences
        _scan_block(
            S, first_S, end_S, row, column, layout, chunks, heads, known, REVERSE, shape, WIDTH, CHUNKS, COLUMNS
        )
    else:
        program -= rows * BLOCKS
        row = (program // Z_BLOCKS).to(tl.int64)
        column = program % Z_BLOCKS * COLUMNS
        known = row // heads < sequences
        _scan_block(
            z, first_z, end_z, row, column, layout, chunks, heads, known, REVERSE, shape, shape.F, CHUNKS, COLUMNS
        )
