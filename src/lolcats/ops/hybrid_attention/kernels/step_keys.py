"""What the decoding kernel does with exact keys: running softmax sums, of one token or a tile of keys more."""

from __future__ import annotations

import triton
import triton.language as tl

from lolcats.ops.hybrid_attention.kernels.tiles import dot


@triton.jit
def _scores(dots, scale, cap, HAS_CAP: tl.constexpr):
    """Scores in units of log 2; `scale` and `cap` carry log2(e)."""
    score = dots * scale
    if HAS_CAP:  # cap * tanh(score / cap)
        score = cap - 2.0 * cap / (1.0 + tl.exp2(2.0 * 1.4426950408889634 * score / cap))
    return score


@triton.jit
def _add_scores(score, keep, v_ND, acc, total, top):
    """Running softmax sums after one more tile of keys."""
    score = tl.where(keep, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key yet
    fade = tl.exp2(top - finite_top)
    weight = tl.exp2(score - finite_top[:, None])
    total = total * fade + tl.sum(weight, 1)
    acc = dot(weight.to(v_ND.dtype), v_ND, acc * fade[:, None])
    return acc, total, new_top


@triton.jit
def add_token(q_MD, sees_M, k_D, v_D, acc, total, top, scale, cap, HAS_CAP: tl.constexpr):
    """Running sums after one more key, of which rows see it or not."""
    score = _scores(tl.sum(q_MD.to(tl.float32) * k_D.to(tl.float32)[None, :], 1), scale, cap, HAS_CAP)
    score = tl.where(sees_M, score, float("-inf"))
    new_top = tl.maximum(top, score)
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - finite_top)
    fade = tl.exp2(top - finite_top)
    total = total * fade + weight
    acc = acc * fade[:, None] + weight[:, None] * v_D.to(tl.float32)[None, :]
    return acc, total, new_top


@triton.jit
def add_slots(
    q_MD,
    mine_M,  # rows that see keys at all
    keys,
    values,
    slot_N,
    seen_N,  # slots that are seen; others are not read
    acc,
    total,
    top,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    D: tl.constexpr,
    DB: tl.constexpr,
):
    """Running sums after a tile of the keys and values [slots, D] in memory."""
    column = tl.arange(0, DB)
    address = slot_N[:, None] * D + column[None, :]
    seen_ND = seen_N[:, None] & (column < D)[None, :]
    k_ND = tl.load(keys + address, mask=seen_ND, other=0.0).to(q_MD.dtype)
    v_ND = tl.load(values + address, mask=seen_ND, other=0.0).to(q_MD.dtype)
    score = _scores(dot(q_MD, tl.trans(k_ND)), scale, cap, HAS_CAP)
    return _add_scores(score, seen_N[None, :] & mine_M[:, None], v_ND, acc, total, top)
