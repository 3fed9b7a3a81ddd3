"""One or a few new tokens of softmax attention, in two launches: decoding steps of exact heads on a GPU, and the checks
and drafts of speculative decoding.

The keys of a row are split over several programs, so that few sequences fill the GPU too; a program takes one key/value
head and reads each key once for all of its query heads. A second launch joins the splits' softmax sums (Flash-Decoding,
https://pytorch.org/blog/flash-decoding). Keys and values are read where they lie, as far as each row's length says.
Lengths are read on the device and the launches follow from shapes alone, so one CUDA graph serves all lengths.
Heads may have a reach: of the keys before it, a query then reads the last ones and the sinks alone, which may lie in a
ring that holds no others.
Importing this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.launch import cdiv, plan_of
from lolcats.ops.hybrid_attention.kernels.shape import WIDE_ROW_BYTES, in_log2, padded, rows
from lolcats.ops.hybrid_attention.kernels.tiles import (
    _FLOOR,
    add_keys,
    fade_sums,
    load_rows,
    sink_logit,
    store_rows,
)

# Keys are split until there are this many programs, sixteen for each multiprocessor of a large GPU: rows of different
# length, and a last wave that is not full, then cost little.
ENOUGH_PROGRAMS = 2112
LEAST_KEYS = 256  # of a split, in memory
MOST_SPLITS = 128


def softmax_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: Tensor,
    sink_logits: Tensor | None,
    scale: float,
    softcap: float | None,
    reach: Tensor | None = None,
    sinks: int = 0,
    ring: int = 0,
) -> Tensor:
    """See `lolcats.modeling.softmax.softmax_attention`, with `length`.

    Args:
        q: [B, H, T, D]; k, v: [B, G, K, D] with any strides. The last dimension of each is contiguous. Or int8
            [B, G, K, D + 4], packed as in `lolcats.ops.eight_bits`: numbers, and their factor in float32.
        length: int [B]; the row's first query sees its first `length` keys, each later query one more. What lies behind
            them is not read.
        sink_logits: [H].
        reach: int [G]; of these keys, the queries of a KV head see the last `reach` and the first `sinks`.
        ring: with a reach: places that the keys after the sinks take in turn, the first one again after the last; 0:
            each has a place of its own.

    Returns:
        [B, H, T, D]; zeros where a row has neither keys nor sinks.
    """
    plan = plan_of((q, k, v, length, sink_logits, reach), "softmax step", scale, softcap, sinks, ring)

    def launches() -> tuple[Tensor]:
        batch, heads, tokens, head_dim = q.shape
        kv_heads, keys = k.shape[1:3]
        splits = splits_of_a_row(batch * kv_heads, keys)
        y = plan.empty_like(q)
        acc = plan.empty((batch, heads * tokens, splits, head_dim), torch.float32)
        total, top = (plan.empty((batch, heads * tokens, splits), torch.float32) for _ in range(2))
        columns = padded(head_dim)
        wide = columns * q.dtype.itemsize > WIDE_ROW_BYTES
        plan.launch(
            split_kernel,
            (batch * kv_heads * splits,),
            *(rows(x) for x in (q, k, v)),
            length,
            reach,
            acc,
            total,
            top,
            kv_heads,
            splits,
            in_log2(scale),
            in_log2(softcap),
            REPEATS=heads // kv_heads,
            T=tokens,
            SINKS=sinks,
            RING=ring,
            PACKED=k.dtype == torch.int8,
            D=head_dim,
            DB=columns,
            M=padded(heads // kv_heads * tokens),
            BN=32 if wide else 64,
            num_warps=4,
            num_stages=2 if wide else 3,
        )
        sums = (acc, total, top, sink_logits, rows(y), heads, splits)
        shape = {"REPEATS": heads // kv_heads, "T": tokens, "D": head_dim, "DB": columns}
        plan.launch(join_kernel, (batch * heads * tokens,), *sums, **shape, BS=16, num_warps=4)
        return (y,)

    return plan.run((q, k, v, length, sink_logits, reach), launches)[0]


softmax_step_op = torch.library.custom_op("lolcats::softmax_step", softmax_step, mutates_args=())


@softmax_step_op.register_fake
def _(q, *_):
    return torch.empty_like(q)


def splits_of_a_row(rows: int, keys: int) -> int:
    """How many programs share the keys of one row and key/value head.

    Args:
        rows: sequences times key/value heads.
        keys: of a row, at most.
    """
    return min(cdiv(ENOUGH_PROGRAMS, rows), max(cdiv(keys, LEAST_KEYS), 1), MOST_SPLITS)


@triton.jit(do_not_specialize=["kv_heads", "splits"])
def split_kernel(
    q,
    k,
    v,
    length,
    reach,  # [G], or None
    acc,  # [B, G, T, REPEATS, splits, D]
    total,  # [B, G, T, REPEATS, splits]
    top,  # [B, G, T, REPEATS, splits]
    kv_heads,
    splits,
    scale,  # of the scores, times log2(e)
    softcap,  # of the scores, times log2(e), or None
    REPEATS: tl.constexpr,
    T: tl.constexpr,
    SINKS: tl.constexpr,
    RING: tl.constexpr,
    PACKED: tl.constexpr,
    D: tl.constexpr,
    DB: tl.constexpr,
    M: tl.constexpr,  # rows of the tile, at least T * REPEATS
    BN: tl.constexpr,
):
    """One program: softmax sums of the queries of one key/value head over one of the row's splits."""
    split = tl.program_id(0) % splits
    bg = (tl.program_id(0) // splits).to(tl.int64)
    b = bg // kv_heads
    g = bg % kv_heads
    row = tl.arange(0, M)
    seen = tl.load(length + b).to(tl.int32)  # by the first query
    keys = seen + (T - 1)
    skipped = seen * 0  # keys between the sinks and the reach of the first query
    if reach is not None:
        far = tl.load(reach + g).to(tl.int32)
        skipped = tl.maximum(seen - far - SINKS, 0)
        keys -= skipped
    share = tl.cdiv(tl.cdiv(keys, splits), BN) * BN
    begin = split * share
    end = tl.minimum(begin + share, keys)
    if T == 1:
        first_head = g * REPEATS
        q_MD = load_rows(q.x + b * q.b, first_head, q.h, first_head + REPEATS, 0, D, M, DB)
    else:
        place = (g * REPEATS + row % REPEATS) * q.h + row // REPEATS * q.t
        q_MD = load_places(q.x + b * q.b, place, row < T * REPEATS, D, DB)
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
        sees_MN = (at_N < end)[None, :]
        there = at_N < end
        if reach is not None:
            at_N = tl.where(at_N < SINKS, at_N, at_N + skipped)
        place_N = at_N
        if RING > 0:
            place_N = tl.where(at_N < SINKS, at_N, SINKS + (at_N - SINKS) % RING)
        if PACKED:
            k_ND = load_packed(k_head, place_N, there, D, DB).to(q_MD.dtype)
            v_ND = load_packed(v_head, place_N, there, D, DB).to(q_MD.dtype)
        elif reach is None:
            k_ND = load_rows(k_head, key, k.t, end, 0, D, BN, DB)
            v_ND = load_rows(v_head, key, v.t, end, 0, D, BN, DB)
        else:
            k_ND = load_places(k_head, place_N.to(tl.int64) * k.t, there, D, DB)
            v_ND = load_places(v_head, place_N.to(tl.int64) * v.t, there, D, DB)
        if T > 1:
            last_M = seen + row // REPEATS  # keys that each query sees
            sees_MN = sees_MN & (at_N[None, :] < last_M[:, None])
            if reach is not None:
                sees_MN = sees_MN & ((at_N[None, :] >= (last_M - far)[:, None]) | (at_N < SINKS)[None, :])
        sum_MD, total_M, top_M = add_keys(q_MD, sees_MN, k_ND, v_ND, sum_MD, total_M, top_M, scale, softcap)
    first = bg * (T * REPEATS) * splits + split
    store_rows(acc + first * D, sum_MD, split * 0, splits * D, T * REPEATS, 0, D)
    tl.store(total + first + row * splits, total_M, mask=row < T * REPEATS)
    tl.store(top + first + row * splits, top_M, mask=row < T * REPEATS)


@triton.jit
def load_places(pointer, place_N, there_N, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Tile [N, COLUMNS] of rows that begin at `place_N`; zero where nothing is there, and from column D on."""
    col = tl.arange(0, COLUMNS)
    mask = there_N[:, None]
    if D % COLUMNS != 0:
        mask = mask & (col < D)[None, :]
    return tl.load(pointer + place_N[:, None] + col[None, :], mask=mask, other=0.0)


@triton.jit
def load_packed(pointer, row_N, there_N, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Tile [N, COLUMNS] of keys or values in 8 bits, rows of D int8 and a float32; zero where nothing is there."""
    place_N = row_N.to(tl.int64) * (D + 4)
    factor_N = tl.load((pointer + place_N + D).to(tl.pointer_type(tl.float32)), mask=there_N, other=0.0)
    return load_places(pointer, place_N, there_N, D, COLUMNS).to(tl.float32) * factor_N[:, None]


@triton.jit(do_not_specialize=["heads", "splits"])
def join_kernel(
    acc,
    total,
    top,
    sink_logits,
    y,
    heads,
    splits,
    REPEATS: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    DB: tl.constexpr,
    BS: tl.constexpr,
):
    """One program: the sums of one query over all splits, and its output."""
    program = tl.program_id(0).to(tl.int64)
    b = program // (heads * T)
    head = program % heads
    t = program * 0
    if T > 1:
        head = program // (REPEATS * T) % (heads // REPEATS) * REPEATS + program % REPEATS
        t = program // REPEATS % T
    sum_1D = tl.zeros([1, DB], tl.float32)
    total_1 = tl.zeros([1], tl.float32)
    top_1 = tl.full([1], float("-inf"), tl.float32)
    if sink_logits is not None:
        top_1 = total_1 + sink_logit(sink_logits, head)
        total_1 += 1.0
    for first in tl.range(0, splits, BS):
        split = first + tl.arange(0, BS)
        top_S = tl.load(top + program * splits + split, mask=split < splits, other=float("-inf"))
        total_S = tl.load(total + program * splits + split, mask=split < splits, other=0.0)
        sum_SD = load_rows(acc + program * splits * D, first, D, splits, 0, D, BS, DB)
        top_1, finite_top, fade = fade_sums(top_1, tl.max(top_S, 0))
        weight_S = tl.exp2(top_S - finite_top)
        total_1 = total_1 * fade + tl.sum(weight_S * total_S, 0)
        sum_1D = sum_1D * fade[:, None] + tl.sum(weight_S[:, None] * sum_SD, 0)[None, :]
    y_1D = sum_1D / tl.maximum(total_1, _FLOOR)[:, None]
    store_rows(y.x + b * y.b + head * y.h, y_1D, t, y.t, 1 + t, 0, D)
