"""The kernel of one token: what its programs do stands in `decode`."""

from __future__ import annotations

import triton
import triton.language as tl

from lolcats.ops.hybrid_attention.kernels.tiles import (
    _FLOOR,
    add_keys,
    dot,
    fade_sums,
    features,
    load_matrix,
    load_rows,
    load_vector,
    load_weight,
    project,
    scaled_scores,
    sink_logit,
    store_matrix,
    store_vector,
)

# Entries of the largest tile of S that a program holds at once; wider states come in pieces of rows.
_PIECE = tl.constexpr(4096)
# Tokens that are folded at once: few, so that the rare fold does not cost the other steps registers and occupancy.
_FOLD_ROWS = tl.constexpr(16)


# Exact keys: running softmax sums after one token or a tile of keys more.


@triton.jit
def _add_token(q_MD, sees_M, k_D, v_D, acc, total, top, scale, softcap):
    """Running sums after one more key, of which rows see it or not."""
    score = scaled_scores(tl.sum(q_MD.to(tl.float32) * k_D.to(tl.float32)[None, :], 1), scale, softcap)
    score = tl.where(sees_M, score, float("-inf"))
    top, finite_top, fade = fade_sums(top, score)
    weight = tl.exp2(score - finite_top)
    total = total * fade + weight
    acc = acc * fade[:, None] + weight[:, None] * v_D.to(tl.float32)[None, :]
    return acc, total, top


@triton.jit
def _add_slots(
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
    softcap,
    shape: tl.constexpr,
):
    """Running sums after a tile of the keys and values [slots, D] in memory."""
    column = tl.arange(0, shape.DB)
    address = slot_N[:, None] * shape.D + column[None, :]
    seen_ND = seen_N[:, None] & (column < shape.D)[None, :]
    k_ND = tl.load(keys + address, mask=seen_ND, other=0.0).to(q_MD.dtype)
    v_ND = tl.load(values + address, mask=seen_ND, other=0.0).to(q_MD.dtype)
    sees_MN = seen_N[None, :] & mine_M[:, None]
    return add_keys(q_MD, sees_MN, k_ND, v_ND, acc, total, top, scale, softcap)


# S and z: the tokens that leave the window, and the product with the state.


@triton.jit
def _project_vector(x_D, weight, bias, head, shape):
    """x W + b of one float32 vector with the head's weights: [P]."""
    x_P = tl.sum(x_D[:, None] * load_weight(weight, head, tl.float32, shape), 0)
    if bias is not None:
        x_P += load_vector(bias + head * shape.P, shape.P, shape.PB).to(tl.float32)
    return x_P


@triton.jit
def _halves(x_MP, HALF: tl.constexpr):
    """Left and right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x_MP, [x_MP.shape[0], 2, HALF]), [0, 2, 1]))


@triton.jit
def _add_state(
    acc,
    q_MP,
    k_P,
    v_D,
    S,
    P: tl.constexpr,
    D: tl.constexpr,
    PB: tl.constexpr,
    DB: tl.constexpr,
    FOLD: tl.constexpr,
):
    """acc + q S, with S [P, D] in memory; with FOLD, S += k v^T comes first and is written."""
    HALF: tl.constexpr = PB // 2
    if (PB * DB > _PIECE) and (PB > 16):
        q_left_MP, q_right_MP = _halves(q_MP, HALF)
        k_left_1P, k_right_1P = _halves(k_P[None, :], HALF)
        LEFT: tl.constexpr = P if P < HALF else HALF
        acc = _add_state(acc, q_left_MP, tl.sum(k_left_1P, 0), v_D, S, LEFT, D, HALF, DB, FOLD)
        if P > HALF:
            S += HALF * D
            acc = _add_state(acc, q_right_MP, tl.sum(k_right_1P, 0), v_D, S, P - HALF, D, HALF, DB, FOLD)
        return acc
    else:
        S_PD = load_matrix(S, 0, P, D, PB, DB)
        if FOLD:
            S_PD += k_P[:, None] * v_D[None, :]
            tl.debug_barrier()  # all threads have read S
            store_matrix(S, S_PD, 0, P, D)
        return dot(q_MP, S_PD, acc)


@triton.jit
def _fold_piece(k_NP, v_ND, S, P: tl.constexpr, D: tl.constexpr, PB: tl.constexpr, DB: tl.constexpr):
    """S += k^T v for S [P, D] in memory, in float32."""
    HALF: tl.constexpr = PB // 2
    if (PB * DB > _PIECE) and (PB > 16):
        left_NP, right_NP = _halves(k_NP, HALF)
        LEFT: tl.constexpr = P if P < HALF else HALF
        _fold_piece(left_NP, v_ND, S, LEFT, D, HALF, DB)
        if P > HALF:
            _fold_piece(right_NP, v_ND, S + HALF * D, P - HALF, D, HALF, DB)
    else:
        S_PD = dot(tl.trans(k_NP), v_ND.to(tl.float32), load_matrix(S, 0, P, D, PB, DB))
        tl.debug_barrier()  # all threads have read S
        store_matrix(S, S_PD, 0, P, D)


@triton.jit
def _fold_block(
    ring_k,
    ring_v,
    maps,
    S,  # the head's
    z,
    head,  # of the weights
    slot,  # where the block begins in the ring
    first,  # position of its first token
    shape: tl.constexpr,
):
    """Add a block of W tokens to S and z in memory."""
    HALVES: tl.constexpr = shape.HALVES
    P: tl.constexpr = shape.P
    D: tl.constexpr = shape.D
    W: tl.constexpr = shape.W
    weight_DP = load_weight(maps.k_weight, head, ring_k.dtype.element_ty, shape)
    for begin in tl.range(0, W, _FOLD_ROWS):
        k_ND = load_rows(ring_k, slot + begin, D, slot + W, 0, D, _FOLD_ROWS, shape.DB)
        v_ND = load_rows(ring_v, slot + begin, D, slot + W, 0, D, _FOLD_ROWS, shape.DB)
        halves = features(project(k_ND, weight_DP, maps.k_bias, head, shape), shape)
        offset = begin + tl.arange(0, _FOLD_ROWS)
        leaves = (offset < W) & (first + offset >= shape.SINKS)
        for half in tl.static_range(HALVES):
            phi_NP = tl.where(leaves[:, None], halves[half], 0.0)
            z_P = load_vector(z + half * P, P, shape.PB) + tl.sum(phi_NP, 0)
            tl.debug_barrier()  # all threads have read z
            store_vector(z + half * P, z_P, P)
            _fold_piece(phi_NP, v_ND, S + half * P * D, P, D, shape.PB, shape.DB)
    tl.debug_barrier()  # the new state is read by other threads next


@triton.jit
def _clear(x, SIZE: tl.constexpr):
    """Zeros in memory."""
    for begin in tl.range(0, SIZE, _PIECE):
        i = begin + tl.arange(0, _PIECE)
        tl.store(x + i, tl.zeros([_PIECE], tl.float32), mask=i < SIZE)


@triton.jit(do_not_specialize=["batch", "kv_heads", "mask_b"])
def step_kernel(
    q,
    k,
    v,
    y,
    gamma,
    maps,
    sink_logits,
    mask,
    page,  # of each sequence; None: the sequence's own number
    state,
    state_b,  # `RowStrides`
    mask_b,
    batch,
    kv_heads,
    scale,  # of the scores, times log2(e)
    softcap,  # of the scores, times log2(e), or None
    CAP: tl.constexpr,  # the linear length cap
    CACHE: tl.constexpr,  # slots of the sparse cache
    N: tl.constexpr,  # sequences of a program
    M: tl.constexpr,  # rows of its tile, at least N * query heads
    BN: tl.constexpr,
    shape: tl.constexpr,
):
    """One program: one token of N sequences, the query heads of one key/value head."""
    HALVES: tl.constexpr = shape.HALVES
    W: tl.constexpr = shape.W
    SINKS: tl.constexpr = shape.SINKS
    P: tl.constexpr = shape.P
    F: tl.constexpr = shape.F
    D: tl.constexpr = shape.D
    DB: tl.constexpr = shape.DB
    PB: tl.constexpr = shape.PB
    REPEATS: tl.constexpr = shape.REPEATS
    SLIDING: tl.constexpr = shape.SLIDING
    SHARES: tl.constexpr = shape.SHARES if shape.MAP != "none" else 0  # states of this kv head
    C: tl.constexpr = W if SLIDING else W * shape.BLOCKS  # slots of the ring
    first = tl.program_id(0) // kv_heads * N
    g = tl.program_id(0) % kv_heads
    row = tl.arange(0, M)
    repeat = row % REPEATS
    column = tl.arange(0, DB)
    row_b = (first + row // REPEATS).to(tl.int64)
    row_h = g * REPEATS + repeat
    there = (row < N * REPEATS) & (row_b < batch)
    in_tile = there[:, None] & (column < D)[None, :]
    q_MD = tl.load(q.x + row_b[:, None] * q.b + row_h[:, None] * q.h + column[None, :], mask=in_tile, other=0.0)

    if shape.MAP != "none":
        x_MP = tl.zeros([M, PB], tl.float32)
        for r in tl.range(0, REPEATS):
            weight_DP = load_weight(maps.q_weight, g * REPEATS + r, q_MD.dtype, shape)
            own_MD = q_MD if REPEATS == 1 else tl.where((repeat == r)[:, None], q_MD, 0.0).to(q_MD.dtype)
            x_MP = dot(own_MD, weight_DP, x_MP)
        if maps.q_bias is not None:
            p = tl.arange(0, PB)
            address = maps.q_bias + row_h[:, None] * P + p[None, :]
            x_MP += tl.load(address, mask=(p < P)[None, :], other=0.0).to(tl.float32)
        q_halves = features(x_MP, shape)

    acc = tl.zeros([M, DB], tl.float32)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    if (sink_logits is not None) and (W > 0 or SINKS > 0):
        top = sink_logit(sink_logits, row_h)
        total += 1.0
    factor = tl.load(gamma + row_h).to(tl.float32)

    for n in tl.range(0, N):
        b = (first + n).to(tl.int64)
        real = b < batch
        if mask is not None:
            real = real & (tl.load(mask + b * mask_b, mask=real, other=0) != 0)
        place = b  # of its state
        if page is not None:
            place = tl.load(page + b, mask=real, other=-1).to(tl.int64)
            real = real & (place >= 0)
        if real:
            # The upper half of the number counts the programs that are done with this sequence, see below.
            at = tl.load(state.position + b).to(tl.int32)
            mine = (row // REPEATS == n) & there
            k_D = tl.load(k.x + b * k.b + g * k.h + column, mask=column < D, other=0.0)
            v_D = tl.load(v.x + b * v.b + g * v.h + column, mask=column < D, other=0.0)
            ring_k = state.k + place * state_b.ring + g * C * D
            ring_v = state.v + place * state_b.ring + g * C * D
            sink_k = state.sink_k + place * state_b.sinks + g * SINKS * D
            sink_v = state.sink_v + place * state_b.sinks + g * SINKS * D
            S = state.S + place * state_b.S
            z = state.z + place * state_b.z

            if (page is not None) and (shape.MAP != "none"):  # noqa: SIM102
                if at == 0:  # the page is new
                    _clear(S + g * SHARES * F * D, SHARES * F * D)
                    _clear(z + g * SHARES * F, SHARES * F)
                    tl.debug_barrier()  # other threads read them next

            # The whole block that leaves the window when this token begins one. A sparse cache has had it before.
            if (shape.MAP != "none") and (not SLIDING) and (CACHE == 0):  # noqa: SIM102
                if (at % W == 0) & (at >= C):
                    for s in tl.range(0, SHARES):
                        own = g * SHARES + s
                        _fold_block(ring_k, ring_v, maps, S + own * F * D, z + own * F, own, at % C, at - C, shape)

            # Exact keys: this token from the arguments, first tokens from the sinks, then cache and window.
            if W > 0 or SINKS > 0:
                sees = mine & ((W > 0) | (at < SINKS))
                acc, total, top = _add_token(q_MD, sees, k_D, v_D, acc, total, top, scale, softcap)
            if SINKS > 0:
                sink = tl.arange(0, shape.SB)
                seen_S = (sink < SINKS) & (sink < at)
                acc, total, top = _add_slots(
                    q_MD, mine, sink_k, sink_v, sink, seen_S, acc, total, top, scale, softcap, shape
                )
            if W > 0:
                start = tl.maximum(at - W + 1 if SLIDING else (at // W - shape.BLOCKS + 1) * W, SINKS)
                if CACHE > 0:  # it fills before anything enters the state
                    filled = tl.minimum(start - SINKS, CACHE)
                    at_cache = place * state_b.cache + g * CACHE * D
                    keys, values = state.cache_k + at_cache, state.cache_v + at_cache
                    for begin in tl.range(0, CACHE, BN):
                        slot = begin + tl.arange(0, BN)
                        seen_N = slot < filled
                        acc, total, top = _add_slots(
                            q_MD, mine, keys, values, slot, seen_N, acc, total, top, scale, softcap, shape
                        )
                for begin in tl.range(0, C, BN):
                    slot = begin + tl.arange(0, BN)
                    held = at - 1 - (at - 1 + C - slot) % C  # position of the token in the slot; negative: none
                    seen_N = (slot < C) & (held >= start)
                    acc, total, top = _add_slots(
                        q_MD, mine, ring_k, ring_v, slot, seen_N, acc, total, top, scale, softcap, shape
                    )
            if W > 0 or SINKS > 0:
                weighs = factor
                if CAP > 0:
                    weighs = factor * tl.maximum((at + 1).to(tl.float32) / CAP, 1.0)
                once = tl.where(mine, weighs, 1.0)
                acc = acc * once[:, None]
                total = total * once

            # The state; without blocks, one token goes into it before.
            if shape.MAP != "none":
                old_k_D = k_D.to(tl.float32)
                old_v_D = v_D.to(tl.float32)
                if W > 0 and SLIDING:  # the token whose slot this one takes
                    address = at % C * D + column
                    has_old = column < tl.where(at >= C, D, 0)
                    old_k_D = tl.load(ring_k + address, mask=has_old, other=0.0).to(tl.float32)
                    old_v_D = tl.load(ring_v + address, mask=has_old, other=0.0).to(tl.float32)
                leaves = at - C >= SINKS
                for s in tl.range(0, SHARES):
                    mine_s = mine if SHARES == 1 else mine & (repeat == s)
                    own = g * SHARES + s
                    if SLIDING:
                        x_P = _project_vector(old_k_D, maps.k_weight, maps.k_bias, own, shape)
                        k_halves = features(x_P[None, :], shape)
                    for half in tl.static_range(HALVES):
                        S_half = S + (own * F + half * P) * D
                        z_half = z + own * F + half * P
                        z_P = load_vector(z_half, P, PB)
                        k_P = tl.zeros([PB], tl.float32)
                        if SLIDING:
                            k_P = tl.where(leaves, tl.sum(k_halves[half], 0), 0.0)
                            z_P += k_P
                            tl.debug_barrier()  # all threads have read z
                            store_vector(z_half, z_P, P)
                        phi_MP = tl.where(mine_s[:, None], q_halves[half], 0.0)
                        total += tl.sum(phi_MP * z_P[None, :], 1)
                        acc = _add_state(acc, phi_MP, k_P, old_v_D, S_half, P, D, PB, DB, SLIDING)

            tl.debug_barrier()  # all threads have read the slot and the position
            if W > 0:
                tl.store(ring_k + at % C * D + column, k_D, mask=column < D)
                tl.store(ring_v + at % C * D + column, v_D, mask=column < D)
            if SINKS > 0:
                is_sink = column < tl.where(at < SINKS, D, 0)
                tl.store(sink_k + at * D + column, k_D, mask=is_sink)
                tl.store(sink_v + at * D + column, v_D, mask=is_sink)
            # The position may change only when the programs of all heads have read it: each counts itself in
            # the upper half, and the last one writes the new position over the count.
            if page is None:
                done = tl.atomic_add(state.position + b, 4294967296) // 4294967296
                if done == kv_heads - 1:
                    tl.store(state.position + b, (at + 1).to(tl.int64))

    out = acc / tl.maximum(total, _FLOOR)[:, None]
    address = y.x + row_b[:, None] * y.b + row_h[:, None] * y.h + column[None, :]
    tl.store(address, out.to(y.x.dtype.element_ty), mask=in_tile)
