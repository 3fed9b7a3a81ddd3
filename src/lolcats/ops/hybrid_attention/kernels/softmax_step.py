"""One token of softmax attention, in two launches: the decoding step of exact heads on a GPU, see `splits`.

Keys and values are read where they lie, as far as each row's length, on the device, says. Importing this module needs
Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.operands import SIZES, in_log2, padded, rows
from lolcats.ops.hybrid_attention.kernels.splits import (
    Sums,
    add_split,
    join_splits,
    joined_splits,
    launch_of_splits,
    splits_of_a_row,
    store_split,
)
from lolcats.ops.hybrid_attention.kernels.tiles import FLOOR, load_rows, store_vector
from lolcats.ops.hybrid_attention.params import Scoring


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
    columns = padded(head_dim)
    split_kernel[(batch * kv_heads * splits,)](
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
        **launch_of_splits(q),
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
