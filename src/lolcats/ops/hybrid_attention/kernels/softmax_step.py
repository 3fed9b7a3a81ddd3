"""One token of softmax attention, in two launches: the decoding step of exact heads on a GPU.

The keys of a row are split over several programs, so that few sequences fill the GPU too; a program takes one key/value
head and reads each key once for all of its query heads. A second launch joins the splits' softmax sums (Flash-Decoding,
https://pytorch.org/blog/flash-decoding). Keys and values are read where they lie, as far as each row's length says.
Lengths are read on the device and the launches follow from shapes alone, so one CUDA graph serves all lengths.
Importing this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.operands import SIZES, cdiv, in_log2, is_wide, padded, rows
from lolcats.ops.hybrid_attention.kernels.tiles import (
    FLOOR,
    add_keys,
    fade_sums,
    load_packed,
    load_rows,
    sink_logit,
    store_rows,
)

# Keys are split until there are this many programs, sixteen for each multiprocessor of a large GPU: rows of different
# length, and a last wave that is not full, then cost little.
ENOUGH_PROGRAMS = 2112
LEAST_KEYS = 256  # of a split, in memory
MOST_SPLITS = 128


@torch.compiler.disable
def softmax_step(
    q: Tensor, k: Tensor, v: Tensor, length: Tensor, sink_logits: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """See `lolcats.modeling.softmax.softmax_attention`, with `length`.

    Args:
        q: [B, H, 1, D]; k, v: [B, G, K, D] with any strides. The last dimension of each is contiguous. Or int8
            [B, G, K, D + 4], packed as in `lolcats.ops.eight_bits`: numbers, and their factor in float32.
        length: int [B]; a row sees its first `length` keys. What lies behind them is not read.
        sink_logits: [H].

    Returns:
        [B, H, 1, D]; zeros where a row has neither keys nor sinks.
    """
    batch, heads, _, head_dim = q.shape
    kv_heads, keys = k.shape[1:3]
    splits = splits_of_a_row(batch * kv_heads, keys)
    y = torch.empty_like(q)
    acc = q.new_empty((batch, heads, splits, head_dim), dtype=torch.float32)
    total, top = (q.new_empty((batch, heads, splits), dtype=torch.float32) for _ in range(2))
    columns = padded(head_dim)
    wide = is_wide(head_dim, q.dtype)
    split_kernel[(batch * kv_heads * splits,)](
        *(rows(x) for x in (q, k, v)),
        length,
        acc,
        total,
        top,
        kv_heads,
        splits,
        in_log2(scale),
        in_log2(softcap),
        REPEATS=heads // kv_heads,
        PACKED=k.dtype == torch.int8,
        D=head_dim,
        DB=columns,
        M=padded(heads // kv_heads),
        BN=32 if wide else 64,
        num_warps=4,
        num_stages=2 if wide else 3,
    )
    sums = (acc, total, top, sink_logits, rows(y), heads, splits)
    join_kernel[(batch * heads,)](*sums, D=head_dim, DB=columns, BS=16, num_warps=4)
    return y


def splits_of_a_row(rows: int, keys: int) -> int:
    """How many programs share the keys of one row and key/value head.

    Args:
        rows: sequences times key/value heads.
        keys: of a row, at most.
    """
    return min(cdiv(ENOUGH_PROGRAMS, rows), max(cdiv(keys, LEAST_KEYS), 1), MOST_SPLITS)


@triton.jit(do_not_specialize=SIZES)
def split_kernel(
    q,
    k,
    v,
    length,
    acc,  # [B, H, splits, D]
    total,  # [B, H, splits]
    top,  # [B, H, splits]
    kv_heads,
    splits,
    scale,  # of the scores, times log2(e)
    softcap,  # of the scores, times log2(e), or None
    REPEATS: tl.constexpr,
    PACKED: tl.constexpr,
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
    keys = tl.load(length + b).to(tl.int32)
    share = tl.cdiv(tl.cdiv(keys, splits), BN) * BN
    begin = split * share
    end = tl.minimum(begin + share, keys)
    first_head = g * REPEATS
    q_MD = load_rows(q.x + b * q.b, first_head, tl.cast(q.h, tl.int64), first_head + REPEATS, 0, D, M, DB)
    k_head = b * k.b + g * k.h
    v_head = b * v.b + g * v.h
    if PACKED:  # else they would be read byte by byte
        k_head, v_head = tl.multiple_of(k_head, 4), tl.multiple_of(v_head, 4)
    k_head, v_head = k.x + k_head, v.x + v_head
    sum_MD = tl.zeros([M, DB], tl.float32)
    total_M = tl.zeros([M], tl.float32)
    top_M = tl.full([M], float("-inf"), tl.float32)
    for key in tl.range(begin, end, BN):
        at_N = key + tl.arange(0, BN)
        if PACKED:
            k_ND = load_packed(k_head, at_N, at_N < end, 0, D, DB).to(q_MD.dtype)
            v_ND = load_packed(v_head, at_N, at_N < end, 0, D, DB).to(q_MD.dtype)
        else:
            k_ND = load_rows(k_head, key, k.t, end, 0, D, BN, DB)
            v_ND = load_rows(v_head, key, v.t, end, 0, D, BN, DB)
        sees_1N = (at_N < end)[None, :]
        sum_MD, total_M, top_M = add_keys(q_MD, sees_1N, k_ND, v_ND, sum_MD, total_M, top_M, scale, softcap)
    first = bg * REPEATS * splits + split
    row = tl.arange(0, M)
    store_rows(acc + first * D, sum_MD, split * 0, splits * D, REPEATS, 0, D)
    tl.store(total + first + row * splits, total_M, mask=row < REPEATS)
    tl.store(top + first + row * splits, top_M, mask=row < REPEATS)


@triton.jit(do_not_specialize=SIZES)
def join_kernel(
    acc,
    total,
    top,
    sink_logits,
    y,
    heads,
    splits,
    D: tl.constexpr,
    DB: tl.constexpr,
    BS: tl.constexpr,
):
    """One program: the sums of one row and query head over all splits, and its output."""
    bh = tl.program_id(0).to(tl.int64)
    sum_1D = tl.zeros([1, DB], tl.float32)
    total_1 = tl.zeros([1], tl.float32)
    top_1 = tl.full([1], float("-inf"), tl.float32)
    if sink_logits is not None:
        top_1 = total_1 + sink_logit(sink_logits, bh % heads)
        total_1 += 1.0
    for first in tl.range(0, splits, BS):
        split = first + tl.arange(0, BS)
        top_S = tl.load(top + bh * splits + split, mask=split < splits, other=float("-inf"))
        total_S = tl.load(total + bh * splits + split, mask=split < splits, other=0.0)
        sum_SD = load_rows(acc + bh * splits * D, first, D, splits, 0, D, BS, DB)
        top_1, finite_top, fade = fade_sums(top_1, tl.max(top_S, 0))
        weight_S = tl.exp2(top_S - finite_top)
        total_1 = total_1 * fade + tl.sum(weight_S * total_S, 0)
        sum_1D = sum_1D * fade[:, None] + tl.sum(weight_S[:, None] * sum_SD, 0)[None, :]
    y_1D = sum_1D / tl.maximum(total_1, FLOOR)[:, None]
    store_rows(y.x + bh // heads * y.b + bh % heads * y.h, y_1D, splits * 0, y.t, 1, 0, D)
