"""Where a chunk's sequence lies in the batch, and where the window of a query begins."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def window_start(entry, SLIDING: tl.constexpr, W: tl.constexpr, BLOCKS: tl.constexpr):
    """First key in the window of the query at `entry`; all keys before it are linear."""
    start = entry - (W - 1) if SLIDING else (entry // W - (BLOCKS - 1)) * W
    return tl.maximum(start, 0)


@triton.jit
def sequence(n, length, table, tokens, HAS_LENGTH: tl.constexpr, RAGGED: tl.constexpr):
    """Where sequence n lies: row of the batch, first token, tokens with padding, tokens, first chunk."""
    if RAGGED:
        entry = table + n * 5
        row = tl.load(entry).to(tl.int64)
        first_token = tl.load(entry + 1).to(tl.int64)
        return row, first_token, tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    else:
        limit = tokens
        if HAS_LENGTH:
            limit = tl.minimum(tl.load(length + n), tokens)
        return n, n * 0, tokens, limit, tokens * 0


@triton.jit
def locate(list_row, slot, length, table, slots, tokens, HAS_LENGTH: tl.constexpr, RAGGED: tl.constexpr):
    """The sequence of chunk `slot` in list `list_row` of chunks: its number, and what `sequence` returns."""
    n = tl.load(slots + slot).to(tl.int64) if RAGGED else list_row
    row, first_token, cells, limit, first_chunk = sequence(n, length, table, tokens, HAS_LENGTH, RAGGED)
    return n, row, first_token, cells, limit, first_chunk
