"""The kernel of `step`.

A program takes a few sequences and one key/value head, and reads each ring, state and weight once for all of
its query heads. The rows of its tile are (sequence, query head); a product with one sequence's keys or state
keeps that sequence's rows, and the others add nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lolcats.ops.hybrid_attention.kernels.constants import _FLOOR
from lolcats.ops.hybrid_attention.kernels.features import features
from lolcats.ops.hybrid_attention.kernels.step_fold import add_state, fold_block, project_vector
from lolcats.ops.hybrid_attention.kernels.step_keys import add_slots, add_token
from lolcats.ops.hybrid_attention.kernels.tiles import dot, load_matrix, load_vector, store_vector


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
    cache_k,
    cache_v,
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
    HORIZON: tl.constexpr,
    CACHE: tl.constexpr,  # slots of the sparse cache
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

            # The whole block that leaves the window when this token begins one. A sparse cache has had it before.
            if (MAP != "none") and (not SLIDING) and (CACHE == 0):  # noqa: SIM102
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

            # Exact keys: this token from the arguments, first tokens from the sinks, then cache and window.
            if W > 0 or SINKS > 0:
                sees = mine & ((W > 0) | (at < SINKS))
                acc, total, top = add_token(q_MD, sees, k_D, v_D, acc, total, top, scale, cap, HAS_CAP)
            if SINKS > 0:
                sink = tl.arange(0, SB)
                seen_S = (sink < SINKS) & (sink < at)
                keys, values = sink_k + bg * SINKS * D, sink_v + bg * SINKS * D
                acc, total, top = add_slots(
                    q_MD, mine, keys, values, sink, seen_S, acc, total, top, scale, cap, HAS_CAP, D, DB
                )
            if W > 0:
                start = tl.maximum(at - W + 1 if SLIDING else (at // W - BLOCKS + 1) * W, SINKS)
                if CACHE > 0:  # it fills before anything enters the state
                    filled = tl.minimum(start - SINKS, CACHE)
                    keys, values = cache_k + bg * CACHE * D, cache_v + bg * CACHE * D
                    for begin in tl.range(0, CACHE, BN):
                        slot = begin + tl.arange(0, BN)
                        acc, total, top = add_slots(
                            q_MD, mine, keys, values, slot, slot < filled, acc, total, top, scale, cap, HAS_CAP, D, DB
                        )
                keys, values = ring_k + bg * C * D, ring_v + bg * C * D
                for begin in tl.range(0, C, BN):
                    slot = begin + tl.arange(0, BN)
                    held = at - 1 - (at - 1 + C - slot) % C  # position of the token in the slot; negative: none
                    seen_N = (slot < C) & (held >= start)
                    acc, total, top = add_slots(
                        q_MD, mine, keys, values, slot, seen_N, acc, total, top, scale, cap, HAS_CAP, D, DB
                    )
            if W > 0 or SINKS > 0:
                weighs = factor
                if HORIZON > 0:
                    weighs = factor * tl.maximum((at + 1).to(tl.float32) / HORIZON, 1.0)
                once = tl.where(mine, weighs, 1.0)
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
