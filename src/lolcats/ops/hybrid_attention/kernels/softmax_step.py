"""One token of softmax attention, in two launches: the decoding step of exact heads on a GPU.

So that few sequences fill a GPU, several programs share the keys of one row and key/value head, and each reads its keys
once for all query heads. What they found is joined in a later launch (Flash-Decoding,
https://pytorch.org/blog/flash-decoding). Splits follow from shapes alone, so one CUDA graph serves all lengths. Keys
and values are read where they lie, as far as each row's length, on the device, says. The step of hybrid attention
(`decode`) splits its window alike. Importing this module needs Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.eight_bits import is_packed
from lolcats.ops.hybrid_attention.kernels.operands import SIZES, cdiv, in_log2, is_wide, launch, padded, rows
from lolcats.ops.hybrid_attention.kernels.tiles import (
    _INTERPRETED,
    _LOG2_E,
    FLOOR,
    dot,
    fade_sums,
    load_rows,
    scaled_scores,
    store_rows,
    store_vector,
)
from lolcats.ops.hybrid_attention.state import Scoring

# Keys are split until there are this many programs, sixteen for each multiprocessor of a large GPU: rows of different
# length, and a last wave that is not full, then cost little.
ENOUGH_PROGRAMS = 2112
LEAST_KEYS = 128  # of a split, in memory
MOST_SPLITS = 128
# Splits that are joined at once, and entries of their tile, at most.
JOINED_SPLITS, JOINED_ENTRIES = 16, 4096
# AMD's GPUs lack the instructions of `_bytes`.
_WORDS = tl.constexpr(torch.version.hip is None)


class Sums(NamedTuple):
    """Softmax sums of the query heads over each split's keys, float32."""

    acc: Any  # [B, H, splits, D], of the values
    total: Any  # [B, H, splits]
    top: Any  # [B, H, splits], the largest score

    @classmethod
    def empty(cls, q: Tensor, heads: int, splits: int) -> Sums:
        """Memory for those of the `heads` of `q` [B, ., 1, D]."""
        sizes = len(q), heads, splits
        return cls(*(q.new_empty(x, dtype=torch.float32) for x in ((*sizes, q.shape[3]), sizes, sizes)))


def splits_of_a_row(rows: int, keys: int, enough: int = ENOUGH_PROGRAMS) -> int:
    """How many programs share the keys of one row and key/value head.

    Args:
        rows: sequences times key/value heads.
        keys: of a row, at most.
        enough: programs; with fewer, rows are split.
    """
    return min(cdiv(enough, rows), max(cdiv(keys, LEAST_KEYS), 1), MOST_SPLITS)


def launch_of_splits(q: Tensor) -> dict[str, int]:
    """Size of a tile of keys, and keywords of the launch."""
    wide = is_wide(q.shape[3], q.dtype)
    return {"BN": 32 if wide else 64, "num_warps": 4, "num_stages": 2 if wide else 3}


def reads_words(q: Tensor, keys: Tensor) -> bool:
    """Whether kernels read keys and values by `_add_words`."""
    return _WORDS.value and padded(q.shape[3]) == 128 and q.dtype == torch.bfloat16 and is_packed(keys)


def joined_splits(rows: int, columns: int) -> int:
    """Splits that a program joins at once, of tiles [rows, columns]; all are powers of two."""
    return min(max(JOINED_ENTRIES // (rows * columns), 1), JOINED_SPLITS)


@triton.jit
def load_tokens(pointer, row_N, there_N, stride, D: tl.constexpr, COLUMNS: tl.constexpr, first=0):
    """Tile [N, COLUMNS] of keys or values in memory from column `first`, zero where nothing is there, and the factors
    [N] of 8 bits."""
    column, row_N = first + tl.arange(0, COLUMNS), row_N.to(tl.int64)
    factor_N = tl.full(row_N.shape, 1.0, tl.float32)
    if pointer.dtype.element_ty == tl.int8:
        factor_N = tl.load((pointer + row_N * (D + 4) + D).to(tl.pointer_type(tl.float32)), mask=there_N, other=0.0)
        stride = D + 4
    mask = there_N[:, None]
    if COLUMNS != D:
        mask = mask & (column < D)[None, :]
    return tl.load(pointer + row_N[:, None] * stride + column[None, :], mask=mask, other=0), factor_N


@triton.jit
def add_tokens(q_MD, k, v, row_N, seen_N, k_t, v_t, acc, total, top, scale, softcap, D: tl.constexpr):
    """Running sums [M, D], [M] and maxima [M] after keys and values in memory. What is not seen is not read.

    Factors of 8 bits are those of the scores and of the weights: the levels themselves are exact in any type.
    """
    k_ND, k_factor_N = load_tokens(k, row_N, seen_N, k_t, D, q_MD.shape[1])
    v_ND, v_factor_N = load_tokens(v, row_N, seen_N, v_t, D, q_MD.shape[1])
    kind: tl.constexpr = tl.float32 if _INTERPRETED else q_MD.dtype  # the interpreter has no bfloat16 of int8
    dots = dot(q_MD, tl.trans(k_ND.to(kind))) * k_factor_N[None, :]
    weight, total, top, fade = _weights(dots, seen_N, total, top, scale, softcap)
    acc = dot((weight * v_factor_N[None, :]).to(q_MD.dtype), v_ND.to(kind), acc * fade[:, None])
    return acc, total, top


@triton.jit
def add_split(
    q_MD, k, v, k_t, v_t, split, splits, last, start, slots, acc, total, top, scale, softcap, BN: tl.constexpr, D
):
    """Running sums after one split of the keys and values in a ring in memory. What is not seen is not read.

    k_t, v_t: entries from one token to the next. Position p lies in slot p % slots; that of the latest key is `last`,
    that of the first key that is seen `start`.
    """
    filled = tl.minimum(last + 1, slots)
    last_slot = tl.maximum(last, 0) % slots
    low = start - last + last_slot  # slot of `start`, or below zero: behind the last slot, where older tokens are
    left = (low + slots - last_slot - 1).to(tl.uint32)  # slots behind the last one with tokens from before `start`
    low = tl.minimum(tl.maximum(low, 0), filled)
    share = tl.cdiv(tl.cdiv(filled - low, splits), BN) * BN
    begin = low + split * share
    end = tl.minimum(begin + share, filled)
    words: tl.constexpr = _WORDS & (q_MD.shape[1] == 128) & (k.dtype.element_ty == tl.int8)
    if words & (q_MD.dtype == tl.bfloat16):
        acc, total, top = _add_words(
            q_MD, k, v, begin, end, last_slot, left, slots, acc, total, top, scale, softcap, BN, D
        )
    else:
        for first in tl.range(begin, end, BN):
            slot_N = first + tl.arange(0, BN)
            seen_N = (slot_N < end) & ((slot_N - last_slot - 1).to(tl.uint32, bitcast=True) >= left)
            acc, total, top = add_tokens(q_MD, k, v, slot_N, seen_N, k_t, v_t, acc, total, top, scale, softcap, D)
    return acc, total, top


@triton.jit
def _add_words(
    q_MD, k, v, begin, end, last_slot, left, slots, acc, total, top, scale, softcap, BN: tl.constexpr, D: tl.constexpr
):
    """The same of 8 bits, four columns at once: fewer loads, and numbers that products take as they are."""
    q0, q1, q2, q3 = _quarters(q_MD)
    before = top
    a0 = tl.zeros(q0.shape, tl.float32)
    a1, a2, a3 = a0, a0, a0
    for first in tl.range(begin, end, BN):
        slot_N = first + tl.arange(0, BN)
        seen_N = (slot_N < end) & ((slot_N - last_slot - 1).to(tl.uint32, bitcast=True) >= left)
        row_N = tl.minimum(slot_N, slots - 1)
        k_word_NC, k_factor_N = _load_words(k, row_N, seen_N, D, q_MD.shape[1])
        v_word_NC, v_factor_N = _load_words(v, row_N, seen_N, D, q_MD.shape[1])
        k0, k1, k2, k3 = _bytes(k_word_NC)
        dots = dot(q3, tl.trans(k3), dot(q2, tl.trans(k2), dot(q1, tl.trans(k1), dot(q0, tl.trans(k0)))))
        weight, total, top, fade = _weights(dots * k_factor_N[None, :], seen_N, total, top, scale, softcap)
        weight = (weight * v_factor_N[None, :]).to(q_MD.dtype)
        v0, v1, v2, v3 = _bytes(v_word_NC)
        a0, a1 = dot(weight, v0, a0 * fade[:, None]), dot(weight, v1, a1 * fade[:, None])
        a2, a3 = dot(weight, v2, a2 * fade[:, None]), dot(weight, v3, a3 * fade[:, None])
    _, _, fade = fade_sums(before, top)
    acc = acc * fade[:, None] + tl.reshape(tl.join(tl.join(a0, a2), tl.join(a1, a3)), acc.shape)
    return acc, total, top


@triton.jit
def _quarters(x_MD):
    """Columns 0, 4, 8, ...; 1, 5, 9, ...; and so on."""
    even, odd = tl.split(tl.reshape(x_MD, [x_MD.shape[0], x_MD.shape[1] // 4, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _load_words(pointer, row_N, there_N, D: tl.constexpr, COLUMNS: tl.constexpr):
    """As `load_tokens` of 8 bits: four columns at once, as an integer. Of rows that are not there any numbers."""
    column = tl.arange(0, COLUMNS // 4)[None, :]
    words = pointer.to(tl.pointer_type(tl.int32))
    at_N = row_N * (D // 4 + 1)
    factor_N = tl.load((words + at_N + D // 4).to(tl.pointer_type(tl.float32)), mask=there_N, other=0.0)
    if COLUMNS != D:
        return tl.load(words + at_N[:, None] + column, mask=column < D // 4, other=0), factor_N
    return tl.load(words + at_N[:, None] + column), factor_N


# Byte number `low` of two words, $4 and $5, as two numbers.
_BYTE = """
prmt.b32 x, $4, $5, 0x0{high}0{low};
lop3.b32 bits, x, 0x007f007f, 0x43004300, 0xea;
lop3.b32 sign, x, 0x00800080, 0x43004300, 0xea;
fma.rn.bf16x2 ${low}, sign, minus, bits;"""
_BYTES = tl.constexpr(
    "{.reg .b32 x, bits, sign, minus; mov.b32 minus, 0xbf80bf80;"
    + "".join(_BYTE.format(low=i, high=i + 4) for i in range(4))
    + "}"
)


@triton.jit
def _bytes(word):
    """The four signed bytes of each integer, in bfloat16, of two integers by four instructions each.

    From 128 plus seven bits of a number 128 is taken, or 256 where it is negative.
    """
    if _INTERPRETED:
        x0, x1 = ((word << 24) >> 24).to(tl.float32), ((word << 16) >> 24).to(tl.float32)
        return x0, x1, ((word << 8) >> 24).to(tl.float32), (word >> 24).to(tl.float32)
    return tl.inline_asm_elementwise(
        _BYTES,
        "=r,=r,=r,=r,r,r",
        [word],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _weights(dots, seen_N, total, top, scale, softcap):
    """Of a tile of keys, with the sum and maximum after it, and the factor of sums before."""
    score = tl.where(seen_N[None, :], scaled_scores(dots, scale, softcap), float("-inf"))
    top, finite_top, fade = fade_sums(top, tl.max(score, 1))
    weight = tl.exp2(score - finite_top[:, None])
    return weight, total * fade + tl.sum(weight, 1), top, fade


@triton.jit
def store_split(sums, head, split, splits, acc, total, top, HEADS: tl.constexpr, D: tl.constexpr):
    """The sums of HEADS query heads from the one that is number `head` of all rows' on."""
    first = head * splits + split
    row = tl.arange(0, acc.shape[0])
    store_rows(sums.acc + first * D, acc, split * 0, splits * D, HEADS, 0, D)
    tl.store(sums.total + first + row * splits, total, mask=row < HEADS)
    tl.store(sums.top + first + row * splits, top, mask=row < HEADS)


@triton.jit
def join_splits(sums, head_M, there_M, splits, sink_logits, sink_M, column_V, D: tl.constexpr, BS: tl.constexpr):
    """Sums [M, V], [M] of query heads over all splits, with the logits of sinks.

    head_M: numbers of the heads among all rows'; sink_M: among the sinks' logits.
    """
    acc = tl.zeros([head_M.shape[0], column_V.shape[0]], tl.float32)
    total = tl.zeros([head_M.shape[0]], tl.float32)
    top = tl.full([head_M.shape[0]], float("-inf"), tl.float32)
    if sink_logits is not None:
        logit = tl.load(sink_logits + sink_M, mask=there_M, other=0.0).to(tl.float32)
        top, total = logit * _LOG2_E, total + 1.0
    for first in tl.range(0, splits, BS):
        split = first + tl.arange(0, BS)
        index_SM = head_M[None, :] * splits + split[:, None]
        there_SM = there_M[None, :] & (split < splits)[:, None]
        top_SM = tl.load(sums.top + index_SM, mask=there_SM, other=float("-inf"))
        total_SM = tl.load(sums.total + index_SM, mask=there_SM, other=0.0)
        there_SMV = there_SM[:, :, None] & (column_V < D)[None, None, :]
        acc_SMV = tl.load(sums.acc + index_SM[:, :, None] * D + column_V[None, None, :], mask=there_SMV, other=0.0)
        top, finite_top, fade = fade_sums(top, tl.max(top_SM, 0))
        weight_SM = tl.exp2(top_SM - finite_top[None, :])
        total = total * fade + tl.sum(weight_SM * total_SM, 0)
        acc = acc * fade[:, None] + tl.sum(weight_SM[:, :, None] * acc_SMV, 0)
    return acc, total


@torch.compiler.disable
def softmax_step(q: Tensor, k: Tensor, v: Tensor, length: Tensor, scoring: Scoring) -> Tensor:
    """See `lolcats.modeling.softmax.softmax_attention`, with `length`.

    Args:
        q: [B, H, 1, D]; k, v: [B, G, K, D] with any strides. The last dimension of each is contiguous. Or int8
            [B, G, K, D + 4], packed as in `lolcats.ops.eight_bits`: numbers, and their factor in float32.
        length: int [B]; a row sees its first `length` keys. What lies behind them is not read.

    Returns:
        [B, H, 1, D]; zeros where a row has neither keys nor sinks.
    """
    batch, heads, _, head_dim = q.shape
    kv_heads, keys = k.shape[1:3]
    splits = splits_of_a_row(batch * kv_heads, keys)
    y = torch.empty_like(q)
    sums = Sums.empty(q, heads, splits)
    columns, settings = padded(head_dim), launch_of_splits(q)
    if reads_words(q, k):  # the fastest of eight on an H200
        settings = {"BN": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 128}
    launch(
        split_kernel,
        (batch * kv_heads * splits,),
        *(rows(x) for x in (q, k, v)),
        length,
        sums,
        kv_heads,
        splits,
        keys,
        in_log2(scoring.scale_of(q)),
        in_log2(scoring.softcap),
        REPEATS=heads // kv_heads,
        D=head_dim,
        DB=columns,
        M=padded(heads // kv_heads),
        **settings,
    )
    join = {"BS": joined_splits(1, columns), "num_warps": 4}
    join_kernel[(batch * heads,)](sums, scoring.sink_logits, rows(y), heads, splits, D=head_dim, DB=columns, **join)
    return y


@triton.jit(do_not_specialize=SIZES)
def split_kernel(
    q,
    k,
    v,
    length,
    sums,
    kv_heads,
    splits,
    slots,
    scale,  # of the scores, times log2(e)
    softcap,  # of the scores, times log2(e), or None
    REPEATS: tl.constexpr,
    D: tl.constexpr,
    DB: tl.constexpr,
    M: tl.constexpr,  # rows of the tile, at least REPEATS
    BN: tl.constexpr,
):
    """One program: softmax sums of the query heads of one key/value head over one of the row's splits."""
    split = tl.program_id(0) % splits
    bg = (tl.program_id(0) // splits).to(tl.int64)
    b = bg // kv_heads
    g = bg % kv_heads
    last = tl.load(length + b).to(tl.int32) - 1
    first_head = g * REPEATS
    q_MD = load_rows(q.x + b * q.b, first_head, tl.cast(q.h, tl.int64), first_head + REPEATS, 0, D, M, DB)
    k_head = b * k.b + g * k.h
    v_head = b * v.b + g * v.h
    if k.x.dtype.element_ty == tl.int8:  # else they would be read byte by byte
        k_head, v_head = tl.multiple_of(k_head, 4), tl.multiple_of(v_head, 4)
    k_head, v_head = k.x + k_head, v.x + v_head
    acc = tl.zeros([M, DB], tl.float32)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    acc, total, top = add_split(
        q_MD, k_head, v_head, k.t, v.t, split, splits, last, 0, slots, acc, total, top, scale, softcap, BN, D
    )
    store_split(sums, bg * REPEATS, split, splits, acc, total, top, REPEATS, D)


@triton.jit(do_not_specialize=SIZES)
def join_kernel(sums, sink_logits, y, heads, splits, D: tl.constexpr, DB: tl.constexpr, BS: tl.constexpr):
    """One program: the sums of one row and query head over all splits, and its output."""
    head_1 = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    acc, total = join_splits(sums, head_1, head_1 >= 0, splits, sink_logits, head_1 % heads, tl.arange(0, DB), D, BS)
    y_D = tl.sum(acc / tl.maximum(total, FLOOR)[:, None], 0)
    bh = tl.program_id(0).to(tl.int64)
    store_vector(y.x + bh // heads * y.b + bh % heads * y.h, y_D.to(y.x.dtype.element_ty), D)
