"""One token of hybrid attention with a state, in one launch: the decoding step on a GPU.

A program takes a few sequences and one key/value head, and reads each ring, state and weight once for all of
its query heads. The rows of its tile are (sequence, query head); a product with one sequence's keys or state
keeps that sequence's rows, and the others add nothing. First the block that leaves a terraced window is added to S and
z, then come the exact keys (this token, sinks, sparse cache, ring) with running softmax sums, then the state.

In memory S is [B, S, F, D] and z [B, S, F], float32; rings [B, G, C, D] hold the token at position p in slot p % C,
sinks are [B, G, sinks, D] and a sparse cache [B, G, slots, D], in the type of the keys. With a sparse cache, the tokens
of the block that leaves the window are scored before the launch, see `sparse_cache.fold_block`. All writes go to the
state's own tensors, so a step can be captured in a CUDA graph. Importing this module needs Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.eager import Call, is_eager
from lolcats.ops.hybrid_attention.kernels.launch import Plan, cdiv, next_power_of_2, plan_of
from lolcats.ops.hybrid_attention.kernels.op import SETTINGS, config_of
from lolcats.ops.hybrid_attention.kernels.shape import FeatureMaps, KernelShape, Rows, in_log2, padded
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
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.sparse_cache import fold_block
from lolcats.ops.hybrid_attention.state import HybridState

# A program takes several sequences, and its weights serve them all, where this many programs remain: four for
# each multiprocessor of a large GPU.
ENOUGH_PROGRAMS = 528
# Rows of a tile that tensor cores take; sequences of one program share them.
ROWS = 16
# Sequences of a program at most. More share the weights, but come one after another: slower on an H200.
MOST_SEQUENCES = 2
# Entries of the largest tile of S that a program holds at once; wider states come in pieces of rows.
_PIECE = tl.constexpr(4096)
_TENSORS = 19  # the operator's first arguments
# Tokens that are folded at once: few, so that the rare fold does not cost the other steps registers and occupancy.
_FOLD_ROWS = tl.constexpr(16)


class RowStrides(NamedTuple):
    """Entries from one sequence's state to the next, in S, z, the ring, the sinks and the sparse cache."""

    S: int
    z: int
    ring: int
    sinks: int
    cache: int


class StateParts(NamedTuple):
    """Tensors of a `HybridState` in the order in which the operator takes them."""

    S: Any
    z: Any
    k: Any
    v: Any
    sink_k: Any
    sink_v: Any
    cache_k: Any
    cache_v: Any
    position: Any


def triton_step(
    q_BH1D: Tensor,
    k_BG1D: Tensor,
    v_BG1D: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    scale: float,
    softcap: float | None,
    state: HybridState,
    mask: Tensor | None,
    inplace: bool,
    block_evicted: bool = True,
    call: Call | None = None,
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`, T = 1. A sequence whose `mask` [B, 1] is False keeps its state.

    `block_evicted`: False, if the caller knows that no block's tokens are scored for a sparse cache. Weights may have
    any floating type. Tensors of `state` that are not contiguous are copied; the returned state has the copies.
    """
    if not inplace:
        state = state.map(_copy)
    elif not all(x.is_contiguous() for x in state.tensors().values()):
        state = state.map(torch.Tensor.contiguous)
    if config.sparse_cache and block_evicted:
        comes_B = torch.ones_like(state.position, dtype=torch.bool) if mask is None else mask[:, 0].bool()
        state.copy_(fold_block(config, params, state, comes_B))
    tensors = (
        *[x if x.stride(-1) == 1 else x.contiguous() for x in (q_BH1D, k_BG1D, v_BG1D)],
        *[None if x is None else x.contiguous() for x in params],
        None if mask is None else mask.bool(),
        *[getattr(state, name) for name in StateParts._fields],
    )
    if call is None and not is_eager(tensors):
        settings = [getattr(config, name) for name in SETTINGS]
        return step_op(*tensors, *settings, scale, softcap), state
    plan = None if call is None else call.plan
    if plan is None:
        plan = plan_of(tensors, "step", config, scale, softcap)
        if call is not None:
            call.plan = plan
    return _launch_step(plan, tensors, config, scale, softcap), state


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "lolcats::hybrid_attention_step",
    mutates_args=("S", "z", "ring_k", "ring_v", "sink_k", "sink_v", "position"),
    schema="(Tensor q, Tensor k, Tensor v, Tensor gamma, Tensor? q_weight, Tensor? k_weight, Tensor? q_bias,"
    " Tensor? k_bias, Tensor? sink_logits, Tensor? mask, Tensor(a!) S, Tensor(b!) z, Tensor(c!) ring_k,"
    " Tensor(d!) ring_v, Tensor(e!) sink_k, Tensor(f!) sink_v, Tensor cache_k, Tensor cache_v, Tensor(g!) position,"
    " str window, int window_size, int window_blocks, int sinks, str? feature_map, int linear_length_cap,"
    " float scale, float? softcap)"
    " -> Tensor",
)
def step_op(*arguments):
    """y [B, H, 1, D]; the state's tensors, contiguous, become those after this token. The cache stays as it is."""
    tensors, (*settings, scale, softcap) = arguments[:_TENSORS], arguments[_TENSORS:]
    plan = plan_of(tensors, "step", *arguments[_TENSORS:])
    return _launch_step(plan, tensors, config_of(*settings), scale, softcap)


def paged_step(
    q_BH1D: Tensor,
    k_BG1D: Tensor,
    v_BG1D: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    scale: float,
    softcap: float | None,
    parts: dict[str, Tensor],
    page_B: Tensor,
    position_B: Tensor,
    y_BH1D: Tensor,
) -> None:
    """One token of each sequence, whose states are read and written where they lie. Nothing waits for the device.

    Args:
        parts: the fields of `HybridState` but the position, each [pages, ...], dense in all axes but the first.
            Without a sparse cache.
        page_B: each sequence's place in `parts`, int32; sequences with a negative one do not exist.
        position_B: int64, tokens that each sequence has seen. At 0 what its page holds is not used. It is not changed.
        y_BH1D: is written, and is anything for sequences that do not exist.
    """
    own = [x if x.stride(-1) == 1 else x.contiguous() for x in (q_BH1D, k_BG1D, v_BG1D)]
    state = [parts.get(name, position_B) for name in StateParts._fields]
    tensors = (*own, *[None if x is None else x.contiguous() for x in params], None, *state, page_B, y_BH1D)
    plan = plan_of(tensors, "paged step", config, scale, softcap)
    _launch_step(plan, tensors, config, scale, softcap)


def _launch_step(
    plan: Plan, tensors: tuple[Any, ...], config: AttentionConfig, scale: float, softcap: float | None
) -> Tensor:
    """`tensors` of the operator; for states in pages then the pages and the output."""

    def launch() -> tuple[Tensor]:
        q, k, v, gamma, q_weight, k_weight, q_bias, k_bias, sink_logits, mask, *parts = tensors[:_TENSORS]
        state = StateParts(*parts)
        grid, constants = _sizes(config, q, k, k_weight, state.cache_k)
        page, y = tensors[_TENSORS:] or (None, plan.empty_like(q))
        plan.launch(
            step_kernel,
            grid,
            *[Rows(x, x.stride(0), x.stride(1), 0) for x in (q, k, v, y)],
            gamma,
            FeatureMaps(q_weight, k_weight, q_bias, k_bias),
            sink_logits,
            mask,
            page,
            state,
            RowStrides(*[x.stride(0) for x in (state.S, state.z, state.k, state.sink_k, state.cache_k)]),
            0 if mask is None else mask.stride(0),
            q.shape[0],
            k.shape[1],
            in_log2(scale),
            in_log2(softcap),
            **constants,
        )
        return (y,)

    return plan.run(tensors, launch)[0]


def _sizes(
    config: AttentionConfig, q: Tensor, k: Tensor, k_weight: Tensor | None, cache_k: Tensor
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid and the kernel's constants."""
    batch, heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    state_heads, columns = (kv_heads, 1) if k_weight is None else (k_weight.shape[0], k_weight.shape[2])
    shape = KernelShape.of(config, q.dtype, heads, kv_heads, state_heads, head_dim, columns)
    shape = shape._replace(PB=padded(shape.P), SB=padded(shape.SINKS))  # the smallest tiles
    sequences = sequences_of_a_program(batch, kv_heads, shape.REPEATS)
    return (cdiv(batch, sequences) * kv_heads,), {
        "CAP": config.linear_length_cap,
        "CACHE": cache_k.shape[2],
        "N": sequences,
        "M": max(next_power_of_2(sequences * shape.REPEATS), ROWS),
        "BN": 32 if shape.WIDE else 64,
        "shape": shape,
        "num_warps": 4,
        "num_stages": 2 if shape.WIDE else 3,
    }


@step_op.register_fake
def _(q, *_):
    return torch.empty_like(q)


def sequences_of_a_program(batch: int, kv_heads: int, repeats: int) -> int:
    """A power of two such that the query heads of so many sequences fit into one tile."""
    count = 1
    while count < MOST_SEQUENCES and 2 * count * repeats <= ROWS and batch * kv_heads >= 2 * count * ENOUGH_PROGRAMS:
        count *= 2
    return count


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
