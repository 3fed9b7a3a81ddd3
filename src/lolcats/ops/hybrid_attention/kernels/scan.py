"""Running sums over chunks: what each chunk adds to a state becomes the state before (or after) that chunk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.constants import STATE_CHUNK
from lolcats.ops.hybrid_attention.kernels.operands import Operands, or_dummy
from lolcats.ops.hybrid_attention.kernels.positions import sequence

_CHUNKS = 8  # per step of the loop
# As many as the threads of a program load at once: each thread then adds up its own columns, alone.
_COLUMNS = 512
_WARPS = 2


def scan_chunks(
    operands: Operands, S: Tensor, z: Tensor, first_S: Tensor | None, first_z: Tensor | None, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Replace every chunk's entry by the sum of the entries before it (after it, if `reverse`), in place.

    Args:
        operands: of the call; they say which chunks form a sequence.
        S: [B, S, N, F, D] of N chunks, any floating type; z: [B, S, N, F], float32; both contiguous. B = 1 in a
            ragged batch.
        first_S, first_z: [sequences, S, F, D] and [sequences, S, F], float32, where the sums begin; None: zero.

    Returns:
        The sums of everything, in the shapes of first_S and first_z; float32.
    """
    _, heads, chunks, features, head_dim = S.shape
    rows, width = operands.segments * heads, features * head_dim
    end_S = torch.empty(operands.sequences, heads, features, head_dim, device=S.device, dtype=torch.float32)
    end_z = torch.empty(operands.sequences, heads, features, device=S.device, dtype=torch.float32)
    S_blocks, z_blocks = triton.cdiv(width, _COLUMNS), triton.cdiv(features, _COLUMNS)
    scan_kernel[(rows * (S_blocks + z_blocks),)](
        S,
        z,
        or_dummy(first_S, z),
        or_dummy(first_z, z),
        end_S,
        end_z,
        or_dummy(operands.table, z),
        chunks,
        rows,
        operands.sequences,
        HAS_FIRST_S=first_S is not None,
        HAS_FIRST_Z=first_z is not None,
        REVERSE=reverse,
        RAGGED=operands.table is not None,
        HEADS=heads,
        WIDTH=width,
        F=features,
        C=STATE_CHUNK,
        CHUNKS=_CHUNKS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return end_S, end_z


@triton.jit
def _chunks_of(row, table, chunks, HEADS: tl.constexpr, C: tl.constexpr, RAGGED: tl.constexpr):
    """Where the entries of one sequence and head begin, and how many there are."""
    if RAGGED:
        _, _, _, limit, first_chunk = sequence(row // HEADS, table, table, chunks, False, True)
        return row % HEADS * chunks + first_chunk, tl.cdiv(limit, C)
    else:
        return row * chunks, chunks


@triton.jit
def _scan_block(
    entries,
    first,
    end,
    column,
    chunks,
    known,  # whether there are a first and an end
    HAS_FIRST: tl.constexpr,
    REVERSE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of one [chunks, WIDTH] matrix."""
    at = column + tl.arange(0, COLUMNS)
    real = at < WIDTH
    at_end = at < tl.where(known, WIDTH, 0)
    total = tl.zeros([COLUMNS], tl.float32)
    if HAS_FIRST:
        total += tl.load(first + at, mask=at_end, other=0.0)
    for begin in tl.range(0, chunks, CHUNKS):
        index = begin + tl.arange(0, CHUNKS)
        mask = (index < chunks)[:, None] & real[None, :]
        if REVERSE:
            address = entries + (chunks - 1 - index).to(tl.int64)[:, None] * WIDTH + at[None, :]
            earlier = address + WIDTH
        else:
            address = entries + index.to(tl.int64)[:, None] * WIDTH + at[None, :]
            earlier = address - WIDTH
        own = tl.load(address, mask=mask, other=0.0).to(tl.float32)
        # Sums without the own entry: the difference of two sums with it would lose all where that entry is huge, as a
        # query's features over a clamped denominator are.
        previous = tl.load(earlier, mask=mask & (index > begin)[:, None], other=0.0).to(tl.float32)
        tl.debug_barrier()  # all is read
        before = total[None, :] + tl.cumsum(previous, 0)
        tl.store(address, before.to(entries.dtype.element_ty), mask=mask)
        total += tl.sum(own, 0)
    tl.store(end + at, total, mask=at_end)


@triton.jit(do_not_specialize=["chunks", "rows", "sequences"])
def scan_kernel(
    S,
    z,
    first_S,
    first_z,
    end_S,
    end_z,
    table,
    chunks,
    rows,
    sequences,
    HAS_FIRST_S: tl.constexpr,
    HAS_FIRST_Z: tl.constexpr,
    REVERSE: tl.constexpr,
    RAGGED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The first programs take S, the others z."""
    BLOCKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    Z_BLOCKS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    if program < rows * BLOCKS:
        row = (program // BLOCKS).to(tl.int64)
        column = program % BLOCKS * COLUMNS
        at = row * WIDTH
        begin, count = _chunks_of(row, table, chunks, HEADS, C, RAGGED)
        known = row // HEADS < sequences
        S += begin * WIDTH
        _scan_block(S, first_S + at, end_S + at, column, count, known, HAS_FIRST_S, REVERSE, WIDTH, CHUNKS, COLUMNS)
    else:
        program -= rows * BLOCKS
        row = (program // Z_BLOCKS).to(tl.int64)
        column = program % Z_BLOCKS * COLUMNS
        at = row * F
        begin, count = _chunks_of(row, table, chunks, HEADS, C, RAGGED)
        known = row // HEADS < sequences
        z += begin * F
        _scan_block(z, first_z + at, end_z + at, column, count, known, HAS_FIRST_Z, REVERSE, F, CHUNKS, COLUMNS)
