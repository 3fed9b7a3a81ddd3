"""Tiles inside the kernels: their sizes, their products, and how they are loaded and stored."""

from __future__ import annotations

import triton
import triton.language as tl

from lolcats.ops.hybrid_attention.kernels.constants import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


def padded(size: int) -> int:
    """Next power of two that a tile may have; tensor cores take at least 16."""
    return max(triton.next_power_of_2(size), 16)


@triton.jit
def dot(a, b, acc=None):
    """a @ b (+ acc) with float32 sums.

    float32 factors are split in two tf32 numbers each, which leaves an error of about 2^-21. Products of whole
    float32 numbers ("ieee") would run outside the matrix units, and spill registers at these tile sizes.
    """
    if _INTERPRETED:  # the interpreter multiplies the bit patterns of bfloat16; the products are exact in float32
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def load_rows(pointer, first, stride, limit, column, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Tile [ROWS, COLUMNS] from row `first` and column `column`; zero from row `limit` and column D on."""
    row = tl.arange(0, ROWS)
    col = column + tl.arange(0, COLUMNS)
    address = pointer + tl.cast(first, tl.int64) * stride + row[:, None] * stride + col[None, :]
    mask = (first + row < limit)[:, None]
    if D % COLUMNS != 0:
        mask = mask & (col < D)[None, :]
    return tl.load(address, mask=mask, other=0.0)


@triton.jit
def store_rows(pointer, tile, first, stride, limit, column, D: tl.constexpr):
    """The inverse of `load_rows`; rows from `limit` on are left alone."""
    row = tl.arange(0, tile.shape[0])
    col = column + tl.arange(0, tile.shape[1])
    address = pointer + tl.cast(first, tl.int64) * stride + row[:, None] * stride + col[None, :]
    mask = (first + row < limit)[:, None] & (col < D)[None, :]
    tl.store(address, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_matrix(pointer, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr):
    """Tile [RB, CB] from column `column` of a contiguous [ROWS, COLUMNS] matrix, padded with zeros."""
    row = tl.arange(0, RB)
    col = column + tl.arange(0, CB)
    address = pointer + row[:, None] * COLUMNS + col[None, :]
    if (ROWS == RB) and (COLUMNS % CB == 0):
        return tl.load(address)
    return tl.load(address, mask=(row < ROWS)[:, None] & (col < COLUMNS)[None, :], other=0.0)


@triton.jit
def store_matrix(pointer, tile, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Tile into a contiguous [ROWS, COLUMNS] matrix, without the padding."""
    row = tl.arange(0, tile.shape[0])
    col = column + tl.arange(0, tile.shape[1])
    address = pointer + row[:, None] * COLUMNS + col[None, :]
    mask = (row < ROWS)[:, None] & (col < COLUMNS)[None, :]
    tl.store(address, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_vector(pointer, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    return tl.load(pointer + index, mask=index < SIZE, other=0.0)


@triton.jit
def store_vector(pointer, x, SIZE: tl.constexpr):
    index = tl.arange(0, x.shape[0])
    tl.store(pointer + index, x, mask=index < SIZE)
