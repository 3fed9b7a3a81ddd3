"""What all kernels share: products, loads and stores of tiles, where sequences and windows lie, softmax sums,
feature maps.

A feature map with two signs is kept as two halves [., P]; they are joined only in memory, where states are [F, D]
with F = P or 2 P.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from lolcats.ops.eight_bits import LEVELS
from lolcats.ops.hybrid_attention.kernels.operands import INTERPRETED, LOG2_E, Rows
from lolcats.ops.hybrid_attention.state import DENOMINATOR_FLOOR

_INTERPRETED = tl.constexpr(INTERPRETED)
FLOOR = tl.constexpr(DENOMINATOR_FLOOR)
_LOG2_E = tl.constexpr(LOG2_E)


# Products, loads and stores.
_LEVEL = tl.constexpr(1 / LEVELS)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
# Added to a number of few digits it leaves no bits for the fraction, which is rounded to the nearest, half to even.
_ROUND = tl.constexpr(1.5 * 2.0**23)


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
def load_rows(x, first, stride, limit, column, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, low=None):
    """Tile [ROWS, COLUMNS] from row `first` and column `column`; zero outside of rows low to limit, columns to D."""
    row = tl.arange(0, ROWS)
    col = column + tl.arange(0, COLUMNS)
    address = x + tl.cast(first, tl.int64) * stride + row[:, None] * stride + col[None, :]
    mask = (first + row < limit)[:, None]
    if low is not None:
        mask = mask & (first + row >= low)[:, None]
    if D % COLUMNS != 0:
        mask = mask & (col < D)[None, :]
    return tl.load(address, mask=mask, other=0.0)


@triton.jit
def factor_of(x, axis=0):
    """Of the 8-bit levels of a token's float32 entries, see `lolcats.ops.eight_bits`."""
    return tl.max(tl.abs(x), axis) * _LEVEL


@triton.jit
def levels_of(x, factor):
    return (tl.div_rn(x, tl.maximum(factor, _TINY)) + _ROUND) - _ROUND


@triton.jit
def store_rows(pointer, tile, first, stride, limit, column, D: tl.constexpr, low=None):
    """The inverse of `load_rows`; other rows are left alone."""
    row = tl.arange(0, tile.shape[0])
    col = column + tl.arange(0, tile.shape[1])
    address = pointer + tl.cast(first, tl.int64) * stride + row[:, None] * stride + col[None, :]
    mask = (first + row < limit)[:, None] & (col < D)[None, :]
    if low is not None:
        mask = mask & (first + row >= low)[:, None]
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


# Where sequences and windows lie.


class Place(NamedTuple):
    """Where a sequence lies in the batch."""

    n: Any  # number of the sequence
    b: Any  # row of the batch
    first_token: Any
    cells: Any  # tokens with padding
    limit: Any  # tokens
    first_chunk: Any  # in the list of chunks


class QueryTile(NamedTuple):
    """What a program over queries works on: one tile of one head."""

    list_row: Any  # list of chunks
    slot: Any  # chunk in the list, of all sequences
    g: Any  # key/value head
    h: Any  # query head
    at: Any  # its sequence, a `Place`
    first: Any  # first query of the tile, counted from the sequence's first token
    at_first: Any  # index of the sequence's first token in [B, H, T]


@triton.jit
def sequence(n, layout, tokens):
    """Where sequence n lies."""
    if layout.table is not None:
        entry = layout.table + n * 5
        first_token = tl.load(entry).to(tl.int64)
        return Place(n, n * 0, first_token, tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3))
    else:
        return Place(n, n, n * 0, tokens, tokens, tokens * 0)


@triton.jit
def locate(list_row, slot, layout, tokens):
    """Where the sequence of chunk `slot` in list `list_row` of chunks lies."""
    n = list_row
    if layout.table is not None:
        n = tl.load(layout.slots + slot).to(tl.int64)
    return sequence(n, layout, tokens)


@triton.jit
def query_tile(layout, tokens, chunks, kv_heads, shape):
    """The tile of this program. Heads that share keys run next to each other."""
    program = tl.program_id(0)
    slot = program // shape.REPEATS % chunks
    bg = program // shape.REPEATS // chunks
    list_row = (bg // kv_heads).to(tl.int64)
    g = (bg % kv_heads).to(tl.int64)
    h = g * shape.REPEATS + program % shape.REPEATS
    at = locate(list_row, slot, layout, tokens)
    at_first = (at.b * kv_heads * shape.REPEATS + h) * tokens + at.first_token
    return QueryTile(list_row, slot, g, h, at, (slot - at.first_chunk) * shape.C, at_first)


@triton.jit
def index_of_tile(tile, chunks, kv_heads, shape):
    """Of a query tile in [B, H, N]; B = 1 in a ragged batch."""
    return (tile.list_row * kv_heads * shape.REPEATS + tile.h) * chunks + tile.slot


@triton.jit
def head_rows(x, head, at):
    """The rows of one head of the sequence at `at`, of a tensor [B, heads, T, D]."""
    return Rows(x.x + (at.b * x.b + tl.cast(head, tl.int64) * x.h + at.first_token * x.t), x.b, x.h, x.t)


@triton.jit
def position_of_entry_0(layout, at):
    """Position in its sequence of the first entry of a grid."""
    position = 0
    if layout.base is not None:
        position = tl.load(layout.base + at.n)
    return position


@triton.jit
def window_start(entry, shape):
    """First key in the window of the query at `entry`; all keys before it are linear."""
    start = entry - (shape.W - 1) if shape.SLIDING else (entry // shape.W - (shape.BLOCKS - 1)) * shape.W
    return tl.maximum(start, 0)


@triton.jit
def load_keys(k, v, key, limit, shape, ROWS: tl.constexpr):
    """Tiles of keys and values [ROWS, D], and which keys they are."""
    k_ND = load_rows(k.x, key, k.t, limit, 0, shape.D, ROWS, shape.DB)
    v_ND = load_rows(v.x, key, v.t, limit, 0, shape.D, ROWS, shape.DB)
    return k_ND, v_ND, key + tl.arange(0, ROWS)


@triton.jit
def in_window(index, row, start, first_position, shape):
    """[M, N]: which keys `index` are in the windows of queries `row` that begin at `start`. Sinks are not."""
    keep = (index[None, :] <= row[:, None]) & (index[None, :] >= start[:, None])
    if shape.SINKS > 0:
        keep = keep & (first_position + index >= shape.SINKS)[None, :]
    return keep


@triton.jit
def before_window(index, start, first_position, shape):
    """[M, N]: which keys are linear for queries whose windows begin at `start`."""
    keep = index[None, :] < start[:, None]
    if shape.SINKS > 0:
        keep = keep & (first_position + index >= shape.SINKS)[None, :]
    return keep


@triton.jit
def load_sinks(sink_k, sink_v, tile, row, first_position, sinks_there, shape):
    """The sinks' keys and values [S, D], their numbers, and which queries see which: [M, S]."""
    sink = tl.arange(0, shape.SB)
    sk = sink_k.x + tile.at.n * sink_k.b + tile.g * sink_k.h
    sv = sink_v.x + tile.at.n * sink_v.b + tile.g * sink_v.h
    k_SD = load_rows(sk, tile.slot * 0, sink_k.t, sinks_there, 0, shape.D, shape.SB, shape.DB)
    v_SD = load_rows(sv, tile.slot * 0, sink_v.t, sinks_there, 0, shape.D, shape.SB, shape.DB)
    keep = (sink < sinks_there)[None, :] & (sink[None, :] <= first_position + row[:, None])
    return k_SD, v_SD, sink, keep


# Running softmax sums.


@triton.jit
def scaled_scores(dots, scale, softcap):
    """Scores in units of log 2; `scale` and `softcap` (None: there is none) carry log2(e)."""
    score = dots * scale
    if softcap is not None:  # softcap * tanh(score / softcap)
        score = softcap - 2.0 * softcap / (1.0 + tl.exp2(score * (2.0 * _LOG2_E / softcap)))
    return score


@triton.jit
def fade_sums(top, tile_top):
    """The maximum with new scores, the same where it is finite, and the factor of the sums so far."""
    new_top = tl.maximum(top, tile_top)
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key yet
    return new_top, finite_top, tl.exp2(top - finite_top)


# Feature maps.


@triton.jit
def load_weight(weight, head, dtype, shape):
    """[D, P] of a head, in the given type."""
    return load_matrix(weight + head * shape.D * shape.P, 0, shape.D, shape.P, shape.DB, shape.PB).to(dtype)


@triton.jit
def project(x_MD, weight_DP, bias, head, shape):
    """x W + b in float32: [M, P]."""
    projected_MP = dot(x_MD, weight_DP)
    if bias is not None:
        projected_MP += load_vector(bias + head * shape.P, shape.P, shape.PB).to(tl.float32)[None, :]
    return projected_MP


@triton.jit
def half_features(u_MP, shape):
    """One half of the features in float32, zero in the padding: the first of u = x, the second of u = -x."""
    if shape.MAP == "hedgehog":
        if u_MP.shape[1] > shape.P:
            u_MP = tl.where((tl.arange(0, u_MP.shape[1]) < shape.P)[None, :], u_MP, float("-inf"))
        half = tl.exp(u_MP - tl.max(u_MP, 1)[:, None])
        return half * (1.0 / tl.sum(half, 1))[:, None]
    else:
        return tl.maximum(u_MP, 0.0)  # t2r; the padding is zero already


@triton.jit
def features(x_MP, shape):
    """Both halves of the features; maps without a second half repeat the first."""
    plus = half_features(x_MP, shape)
    if shape.HALVES == 2:
        return plus, half_features(-x_MP, shape)
    return plus, plus


@triton.jit
def half_gradient(u_MP, half, d_half, shape):
    """Gradient of u [M, P] from that of its half of the features."""
    if shape.MAP == "hedgehog":
        return half * (d_half - tl.sum(half * d_half, 1)[:, None])
    else:
        return tl.where(u_MP > 0, d_half, 0.0)
