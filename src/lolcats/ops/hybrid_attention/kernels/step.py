"""One token of hybrid attention with a state, in one launch: the decoding step on a GPU.

A program takes a few sequences and one key/value head, and reads each ring, state and weight once for all of
its query heads. The rows of its tile are (sequence, query head); a product with one sequence's keys or state
keeps that sequence's rows, and the others add nothing. All writes go to the state's own tensors, so a step can
be captured in a CUDA graph. Importing this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.common import _FLOOR
from lolcats.ops.hybrid_attention.kernels.common import LOG2_E
from lolcats.ops.hybrid_attention.kernels.common import WIDE_ROW_BYTES
from lolcats.ops.hybrid_attention.kernels.common import dot
from lolcats.ops.hybrid_attention.kernels.common import features
from lolcats.ops.hybrid_attention.kernels.common import load_matrix
from lolcats.ops.hybrid_attention.kernels.common import load_vector
from lolcats.ops.hybrid_attention.kernels.common import or_dummy
from lolcats.ops.hybrid_attention.kernels.common import padded
from lolcats.ops.hybrid_attention.kernels.common import store_vector
from lolcats.ops.hybrid_attention.kernels.step_fold import add_state
from lolcats.ops.hybrid_attention.kernels.step_fold import fold_block
from lolcats.ops.hybrid_attention.kernels.step_fold import project_vector
from lolcats.ops.hybrid_attention.spec import HybridParams
from lolcats.ops.hybrid_attention.spec import HybridSpec
from lolcats.ops.hybrid_attention.state import HybridState

# A program takes several sequences, and its weights serve them all, where this many programs remain: four for
# each multiprocessor of a large GPU.
ENOUGH_PROGRAMS = 528
# Rows of a tile that tensor cores take; sequences of one program share them.
ROWS = 16
# Sequences of a program at most. More share the weights, but come one after another: slower on an H200.
MOST_SEQUENCES = 2
# Tensors of a `HybridState` in the order in which the operator takes them; there is no sparse cache here.
STATE_PARTS = ("S", "z", "k", "v", "sink_k", "sink_v", "position")


def triton_step(
    q_BH1D: Tensor,
    k_BG1D: Tensor,
    v_BG1D: Tensor,
    spec: HybridSpec,
    params: HybridParams,
    *,
    scale: float,
    softcap: float | None,
    state: HybridState,
    mask: Tensor | None,
    inplace: bool,
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`, T = 1. A sequence whose `mask` [B, 1] is False keeps its state.

    Weights may have any floating type. Tensors of `state` that are not contiguous are copied; the returned
    state has the copies.
    """
    state = state.map(torch.Tensor.contiguous) if inplace else state.map(_copy)
    y_BH1D = step_op(
        *(x if x.stride(-1) == 1 else x.contiguous() for x in (q_BH1D, k_BG1D, v_BG1D)),
        *(None if x is None else x.contiguous() for x in params),
        None if mask is None else mask.bool(),
        *(getattr(state, name) for name in STATE_PARTS),
        spec.window,
        spec.window_size,
        spec.blocks,
        spec.sinks,
        spec.feature_map,
        scale,
        softcap,
    )
    return y_BH1D, state


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "lolcats::hybrid_attention_step",
    mutates_args=("S", "z", "ring_k", "ring_v", "sink_k", "sink_v", "position"),
    schema="(Tensor q, Tensor k, Tensor v, Tensor gamma, Tensor? q_weight, Tensor? k_weight, Tensor? q_bias,"
    " Tensor? k_bias, Tensor? sink_logits, Tensor? mask, Tensor(a!) S, Tensor(b!) z, Tensor(c!) ring_k,"
    " Tensor(d!) ring_v, Tensor(e!) sink_k, Tensor(f!) sink_v, Tensor(g!) position, str window, int window_size,"
    " int blocks, int sinks, str? feature_map, float scale, float? softcap) -> Tensor",
)
def step_op(
    q,
    k,
    v,
    gamma,
    q_weight,
    k_weight,
    q_bias,
    k_bias,
    sink_logits,
    mask,
    S,
    z,
    ring_k,
    ring_v,
    sink_k,
    sink_v,
    position,
    window,
    window_size,
    blocks,
    sinks,
    feature_map,
    scale,
    softcap,
):
    """y [B, H, 1, D]; the state's tensors, contiguous, become those after this token."""
    y = torch.empty_like(q)
    batch, heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    columns = 1 if k_weight is None else k_weight.shape[2]
    sequences = _sequences(batch, kv_heads, heads // kv_heads)
    is_wide = padded(head_dim) * q.dtype.itemsize > WIDE_ROW_BYTES
    step_kernel[(triton.cdiv(batch, sequences) * kv_heads,)](
        q,
        k,
        v,
        gamma,
        or_dummy(q_weight, q),
        or_dummy(k_weight, q),
        or_dummy(q_bias, q),
        or_dummy(k_bias, q),
        or_dummy(sink_logits, q),
        or_dummy(mask, q),
        S,
        z,
        ring_k,
        ring_v,
        sink_k,
        sink_v,
        position,
        y,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *y.stride()[:2],
        0 if mask is None else mask.stride(0),
        batch,
        scale * LOG2_E,
        0.0 if softcap is None else softcap * LOG2_E,
        HAS_MASK=mask is not None,
        HAS_CAP=softcap is not None,
        HAS_BIAS=q_bias is not None,
        HAS_SINK_LOGITS=sink_logits is not None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        STATE_HEADS=1 if k_weight is None else k_weight.shape[0],
        D=head_dim,
        P=columns,
        MAP=feature_map or "none",
        SLIDING=window == "sliding" or window_size == 0,
        W=window_size,
        BLOCKS=blocks,
        SINKS=sinks,
        N=sequences,
        M=max(triton.next_power_of_2(sequences * (heads // kv_heads)), ROWS),
        DB=padded(head_dim),
        PB=padded(columns),
        SB=padded(sinks),
        BN=32 if is_wide else 64,
        num_warps=4,
        num_stages=2 if is_wide else 3,
    )
    return y


@step_op.register_fake
def _(q, *_):
    return torch.empty_like(q)


def _sequences(batch: int, kv_heads: int, repeats: int) -> int:
    """Sequences of one program: a power of two whose query heads fit into one tile."""
    count = 1
    while count < MOST_SEQUENCES and 2 * count * repeats <= ROWS and batch * kv_heads >= 2 * count * ENOUGH_PROGRAMS:
        count *= 2
    return count


@triton.jit
def _score(dots, scale, cap, HAS_CAP: tl.constexpr):
    """Scores in units of log 2; `scale` and `cap` carry log2(e)."""
    score = dots * scale
    if HAS_CAP:  # cap * tanh(score / cap)
        score = cap - 2.0 * cap / (1.0 + tl.exp2(2.0 * 1.4426950408889634 * score / cap))
    return score


@triton.jit
def _add_keys(score, keep, v_ND, acc, total, top):
    """Running softmax sums after one more tile of keys."""
    score = tl.where(keep, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key yet
    fade = tl.exp2(top - finite_top)
    weight = tl.exp2(score - finite_top[:, None])
    total = total * fade + tl.sum(weight, 1)
    acc = dot(weight.to(v_ND.dtype), v_ND, acc * fade[:, None])
    return acc, total, new_top


@triton.jit(do_not_specialize=["batch", "mask_b"])
def step_kernel(
    q,
    k,
    v,
    gamma,
    q_weight,
    k_weight,
    q_bias,
    k_bias,
    sink_logits,
    mask,
    S,
    z,
    ring_k,
    ring_v,
    sink_k,
    sink_v,
    position,
    y,
    q_b,
    q_h,
    k_b,
    k_g,
    v_b,
    v_g,
    y_b,
    y_h,
    mask_b,
    batch,
    scale,  # of the scores, times log2(e)
    cap,  # of the scores, times log2(e)
    HAS_MASK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    STATE_HEADS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    MAP: tl.constexpr,
    SLIDING: tl.constexpr,
    W: tl.constexpr,
    BLOCKS: tl.constexpr,
    SINKS: tl.constexpr,
    N: tl.constexpr,  # sequences of a program
    M: tl.constexpr,  # rows of its tile, at least N * query heads
    DB: tl.constexpr,
    PB: tl.constexpr,
    SB: tl.constexpr,
    BN: tl.constexpr,
):
    """One program: one token of N sequences, the query heads of one key/value head."""
    REPEATS: tl.constexpr = HEADS // KV_HEADS
    SHARES: tl.constexpr = STATE_HEADS // KV_HEADS if MAP != "none" else 0  # states of this key/value head
    TWO: tl.constexpr = (MAP == "hedgehog") or (MAP == "exp")
    F: tl.constexpr = 2 * P if TWO else P
    C: tl.constexpr = W if SLIDING else W * BLOCKS  # slots of the ring
    first = tl.program_id(0) // KV_HEADS * N
    g = tl.program_id(0) % KV_HEADS
    row = tl.arange(0, M)
    repeat = row % REPEATS
    column = tl.arange(0, DB)
    row_b = (first + row // REPEATS).to(tl.int64)
    row_h = g * REPEATS + repeat
    there = (row < N * REPEATS) & (row_b < batch)
    in_tile = there[:, None] & (column < D)[None, :]
    q_MD = tl.load(q + row_b[:, None] * q_b + row_h[:, None] * q_h + column[None, :], mask=in_tile, other=0.0)

    if MAP != "none":
        x_MP = tl.zeros([M, PB], tl.float32)
        for r in tl.range(0, REPEATS):
            weight_DP = load_matrix(q_weight + (g * REPEATS + r) * D * P, 0, D, P, DB, PB).to(q_MD.dtype)
            own_MD = q_MD if REPEATS == 1 else tl.where((repeat == r)[:, None], q_MD, 0.0).to(q_MD.dtype)
            x_MP = dot(own_MD, weight_DP, x_MP)
        if HAS_BIAS:
            p = tl.arange(0, PB)
            x_MP += tl.load(q_bias + row_h[:, None] * P + p[None, :], mask=(p < P)[None, :], other=0.0).to(tl.float32)
        q_plus, q_minus = features(x_MP, MAP, P)

    acc = tl.zeros([M, DB], tl.float32)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    if HAS_SINK_LOGITS and (W > 0 or SINKS > 0):
        top = tl.load(sink_logits + row_h).to(tl.float32) * 1.4426950408889634
        total += 1.0
    factor = tl.load(gamma + row_h).to(tl.float32)

    for n in tl.range(0, N):
        b = (first + n).to(tl.int64)
        real = b < batch
        if HAS_MASK:
            real = real & (tl.load(mask + b * mask_b, mask=real, other=0) != 0)
        if real:
            bg = b * KV_HEADS + g
            # The upper half of the number counts the programs that are done with this sequence, see below.
            at = tl.load(position + b).to(tl.int32)
            mine = (row // REPEATS == n) & there
            k_D = tl.load(k + b * k_b + g * k_g + column, mask=column < D, other=0.0)
            v_D = tl.load(v + b * v_b + g * v_g + column, mask=column < D, other=0.0)

            # The whole block that leaves the window when this token begins one.
            if (MAP != "none") and (not SLIDING):  # noqa: SIM102
                if (at % W == 0) & (at >= C):
                    for s in tl.range(0, SHARES):
                        fold_block(
                            ring_k + bg * C * D,
                            ring_v + bg * C * D,
                            k_weight,
                            k_bias,
                            S,
                            z,
                            b * STATE_HEADS + g * SHARES + s,
                            g * SHARES + s,
                            at % C,
                            at - C,
                            HAS_BIAS,
                            D,
                            P,
                            MAP,
                            W,
                            SINKS,
                            DB,
                            PB,
                        )

            # The window: this token from the arguments, the others from the ring, first tokens from the sinks.
            if W > 0 or SINKS > 0:
                own = (W > 0) | (at < SINKS)
                own_score = _score(tl.sum(q_MD.to(tl.float32) * k_D.to(tl.float32)[None, :], 1), scale, cap, HAS_CAP)
                own_score = tl.where(mine & own, own_score, float("-inf"))
                new_top = tl.maximum(top, own_score)
                finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
                own_weight = tl.exp2(own_score - finite_top)
                fade = tl.exp2(top - finite_top)
                total = total * fade + own_weight
                acc = acc * fade[:, None] + own_weight[:, None] * v_D.to(tl.float32)[None, :]
                top = new_top
            if SINKS > 0:
                sink = tl.arange(0, SB)
                seen_S = (sink < SINKS) & (sink < at)
                sink_address = (bg * SINKS + sink[:, None]) * D + column[None, :]
                seen_SD = seen_S[:, None] & (column < D)[None, :]
                k_SD = tl.load(sink_k + sink_address, mask=seen_SD, other=0.0).to(q_MD.dtype)
                v_SD = tl.load(sink_v + sink_address, mask=seen_SD, other=0.0).to(q_MD.dtype)
                sink_score = _score(dot(q_MD, tl.trans(k_SD)), scale, cap, HAS_CAP)
                acc, total, top = _add_keys(sink_score, seen_S[None, :] & mine[:, None], v_SD, acc, total, top)
            if W > 0:
                start = tl.maximum(at - W + 1 if SLIDING else (at // W - BLOCKS + 1) * W, SINKS)
                for begin in tl.range(0, C, BN):
                    slot = begin + tl.arange(0, BN)
                    held = at - 1 - (at - 1 + C - slot) % C  # position of the token in the slot; negative: none
                    seen_N = (slot < C) & (held >= start)
                    address = (bg * C + slot[:, None]) * D + column[None, :]
                    seen_ND = seen_N[:, None] & (column < D)[None, :]
                    k_ND = tl.load(ring_k + address, mask=seen_ND, other=0.0).to(q_MD.dtype)
                    v_ND = tl.load(ring_v + address, mask=seen_ND, other=0.0).to(q_MD.dtype)
                    score = _score(dot(q_MD, tl.trans(k_ND)), scale, cap, HAS_CAP)
                    acc, total, top = _add_keys(score, seen_N[None, :] & mine[:, None], v_ND, acc, total, top)
            if W > 0 or SINKS > 0:
                once = tl.where(mine, factor, 1.0)
                acc = acc * once[:, None]
                total = total * once

            # The state; without blocks, one token goes into it before.
            if MAP != "none":
                old_k_D = k_D.to(tl.float32)
                old_v_D = v_D.to(tl.float32)
                if W > 0 and SLIDING:  # the token whose slot this one takes
                    address = (bg * C + at % C) * D + column
                    has_old = column < tl.where(at >= C, D, 0)
                    old_k_D = tl.load(ring_k + address, mask=has_old, other=0.0).to(tl.float32)
                    old_v_D = tl.load(ring_v + address, mask=has_old, other=0.0).to(tl.float32)
                leaves = at - C >= SINKS
                for s in tl.range(0, SHARES):
                    mine_s = mine if SHARES == 1 else mine & (repeat == s)
                    head = (b * STATE_HEADS + g * SHARES + s).to(tl.int64)
                    S_head = S + head * F * D
                    z_plus = load_vector(z + head * F, P, PB)
                    z_minus = load_vector(z + head * F + (F - P), P, PB)
                    k_plus = tl.zeros([PB], tl.float32)
                    k_minus = tl.zeros([PB], tl.float32)
                    if SLIDING:
                        x_P = project_vector(old_k_D, k_weight, k_bias, g * SHARES + s, HAS_BIAS, D, P, DB, PB)
                        k_plus_1P, k_minus_1P = features(x_P[None, :], MAP, P)
                        k_plus = tl.where(leaves, tl.sum(k_plus_1P, 0), 0.0)
                        k_minus = tl.where(leaves, tl.sum(k_minus_1P, 0), 0.0)
                        z_plus += k_plus
                        z_minus += k_minus
                        tl.debug_barrier()  # all threads have read z
                        store_vector(z + head * F, z_plus, P)
                        if TWO:
                            store_vector(z + head * F + P, z_minus, P)
                    plus = tl.where(mine_s[:, None], q_plus, 0.0)
                    total += tl.sum(plus * z_plus[None, :], 1)
                    acc = add_state(acc, plus, k_plus, old_v_D, S_head, P, D, PB, DB, SLIDING)
                    if TWO:
                        minus = tl.where(mine_s[:, None], q_minus, 0.0)
                        total += tl.sum(minus * z_minus[None, :], 1)
                        acc = add_state(acc, minus, k_minus, old_v_D, S_head + P * D, P, D, PB, DB, SLIDING)

            tl.debug_barrier()  # all threads have read the slot and the position
            if W > 0:
                tl.store(ring_k + (bg * C + at % C) * D + column, k_D, mask=column < D)
                tl.store(ring_v + (bg * C + at % C) * D + column, v_D, mask=column < D)
            if SINKS > 0:
                is_sink = column < tl.where(at < SINKS, D, 0)
                tl.store(sink_k + (bg * SINKS + at) * D + column, k_D, mask=is_sink)
                tl.store(sink_v + (bg * SINKS + at) * D + column, v_D, mask=is_sink)
            # The position may change only when the programs of all heads have read it: each counts itself in
            # the upper half, and the last one writes the new position over the count.
            done = tl.atomic_add(position + b, 4294967296) // 4294967296
            if done == KV_HEADS - 1:
                tl.store(position + b, (at + 1).to(tl.int64))

    out = acc / tl.maximum(total, _FLOOR)[:, None]
    tl.store(
        y + row_b[:, None] * y_b + row_h[:, None] * y_h + column[None, :], out.to(y.dtype.element_ty), mask=in_tile
    )
