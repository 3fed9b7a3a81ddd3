"""One token of hybrid attention with a state, in two launches: the decoding step on a GPU.

The first, without a linear part none, makes the features of the queries, many sequences a program so that they share
the weights, and adds to S and z the tokens that leave the window. The second only reads the states. A program takes
one sequence and one key/value head, and reads ring and state once for all of its query heads: exact keys (this token,
sinks, ring) with running softmax sums, then the state. Where there are few sequences, several programs
divide the columns of the values and of S, and each reads all keys.

In memory S is [B, S, F, D] and z [B, S, F], float32; rings [B, G, C, D] hold the token at position p in slot p % C,
sinks are [B, G, sinks, D], in the type of the keys; or both are packed in 8 bits (`lolcats.ops.eight_bits`). All
writes go to the state's own tensors, so a step can be captured in a CUDA graph. Importing this module needs Triton.

In a step of decoding many short kernels follow one another, and starting each takes about a microsecond in which the
memory idles. With programmatic dependent launches, on Hopper, a kernel's programs start as soon as those of the one
before have all started, and wait for its end themselves; weights they may load before that.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.kernels.operands import (
    INTERPRETED,
    SIZES,
    FeatureMaps,
    KernelShape,
    Rows,
    cdiv,
    in_log2,
    next_power_of_2,
    padded,
)
from lolcats.ops.hybrid_attention.kernels.tiles import (
    _LOG2_E,
    FLOOR,
    add_keys,
    dot,
    factor_of,
    fade_sums,
    features,
    levels_of,
    load_matrix,
    load_packed,
    load_rows,
    load_vector,
    load_weight,
    project,
    scaled_scores,
    store_matrix,
    store_rows,
    store_vector,
)
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.state import HybridState

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # other devices, and older versions
    gdc_launch_dependents = gdc_wait = None

# Programs divide the columns of the values until there are so many: two for each multiprocessor of a large GPU.
ENOUGH_PROGRAMS = 264
# Programs that fold, at most: eight for each multiprocessor. Those that find nothing to do take their time, too.
MOST_FOLDING = 1056
# Rows of a tile that tensor cores take, and columns of the narrowest.
LEAST = 16
# Launches of the step for few and for many sequences: the fastest of twenty on an H200, head_dim 128.
_FEW = {"BN": 64, "BF": 64, "num_warps": 4, "num_stages": 3}
_MANY = {"BN": 32, "BF": 32, "num_warps": 2, "num_stages": 2}
_FLOAT32 = {"BN": 32, "BF": 32, "num_warps": 4, "num_stages": 2}
# Sequences of a tile of features.
MOST_SEQUENCES = 64
# Entries of the largest tile of S that a fold holds at once; wider states come in pieces of rows.
_PIECE = tl.constexpr(4096)
# Tokens that are folded at once; fewer of short blocks and of rows that would fill the shared memory of small GPUs.
_FOLD_ROWS = tl.constexpr(64)
_FEW_FOLD_ROWS = tl.constexpr(16)
# Sequences whose positions a program looks at together.
_SEQUENCES = tl.constexpr(1024)


class Strides(NamedTuple):
    """Entries in S, z, the ring and the sinks from one sequence, or key/value head, to the next."""

    S: int
    z: int
    ring: int
    sinks: int


class Places(NamedTuple):
    """Where the states lie, and whose they are.

    page: int32 [B], each sequence's place among the states, negative if it does not exist; None: its own number.
    heads: int64, the key/value head of q, k, v and y that each state head belongs to; None: 0, 1, ...
    """

    page: Any
    heads: Any
    state: HybridState
    strides: Strides
    head_strides: Strides


@torch.compiler.disable
def triton_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    state: HybridState,
    page_B: Tensor | None = None,
    y_BH1D: Tensor | None = None,
    heads_G: Tensor | None = None,
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`, T = 1; or of sequences whose states are in pages. Nothing waits for the device.

    Weights may have any floating type. Tensors of `state` that are not contiguous are copied, but those of pages are
    not; the returned state has the copies.

    Args:
        state: of pages the views of `pages.StatePages`, dense in all axes but the first two, and the tokens that each
            sequence has seen: at 0 what its page holds is not used. These positions are not changed.
        page_B: each sequence's place in `state`, int32; sequences with a negative one do not exist.
        y_BH1D: is written, and is anything for sequences that do not exist.
        heads_G: int64, the key/value heads that have states and parameters, where q, k, v and y have others beside
            them, which are not read or written; None: all.
    """
    if page_B is None and not all(x.is_contiguous() for x in state):
        state = state.map(torch.Tensor.contiguous)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    window_factor, *maps, sink_logits = (None if x is None else x.contiguous() for x in params.tensors)
    y = torch.empty_like(q) if y_BH1D is None else y_BH1D
    batch, heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    if heads_G is not None:
        heads, kv_heads = heads // kv_heads * len(heads_G), len(heads_G)
    state_heads, columns = (kv_heads, 1) if maps[1] is None else (maps[1].shape[0], maps[1].shape[2])
    shape = KernelShape.of(config, q.dtype, heads, kv_heads, state_heads, head_dim, columns)
    shape = shape._replace(PB=padded(shape.P), SB=padded(shape.SINKS))  # the smallest tiles
    rows = [Rows(x, x.stride(0), x.stride(1), 0) for x in (q, k, v, y)]
    own = (state.S, state.z, state.k, state.sink_k)
    by_head = [x.shape[1] * x.stride(1) // kv_heads for x in own]
    places = Places(page_B, heads_G, state, Strides(*[x.stride(0) for x in own]), Strides(*by_head))
    phi = None
    if config.feature_map is not None:
        sizes = (batch, heads, shape.F)
        phi = q.new_empty(sizes, dtype=torch.bfloat16 if q.dtype.itemsize == 2 else torch.float32)
        tile = min(max(next_power_of_2(batch), LEAST), MOST_SEQUENCES)
        prepare_kernel[(cdiv(batch, tile) * heads + min(batch * state_heads, MOST_FOLDING),)](
            *rows[:3],
            phi,
            FeatureMaps(*maps),
            places,
            batch,
            kv_heads,
            M=tile,
            shape=shape,
            num_warps=4,
            **early_launch(q.device),
        )
    split = programs_of_a_head(batch * kv_heads, shape.DB)
    step_kernel[(batch * kv_heads * split,)](
        *rows[:3],
        phi,
        rows[3],
        window_factor,
        sink_logits,
        places,
        kv_heads,
        in_log2(params.scale_of(q)),
        in_log2(params.softcap),
        CAP=config.linear_length_cap,
        SPLIT=split,
        M=max(next_power_of_2(shape.REPEATS), LEAST),
        **(_FLOAT32 if q.dtype == torch.float32 else _FEW if split > 1 else _MANY),
        shape=shape,
        **early_launch(q.device),
    )
    return y, state


def programs_of_a_head(heads: int, columns: int) -> int:
    """How many programs divide the columns of each of `heads` key/value heads of all sequences: a power of two."""
    count = 1
    while 2 * count * heads <= ENOUGH_PROGRAMS and columns > LEAST * count:
        count *= 2
    return count


@cache
def early_launch(device: torch.device) -> dict[str, Any]:
    """Keywords of a launch whose kernel takes EARLY and calls `wait_for_inputs`."""
    known = gdc_wait is not None and not INTERPRETED and torch.version.hip is None
    early = known and torch.cuda.get_device_capability(device) == (9, 0)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Before this call a kernel writes nothing, and reads only what was written before the last ordinary launch.

    That is true of weights: ordinary launches wait for all before them, and a forward pass begins with some.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _place(b, places):
    """Whether a sequence takes part, and where its state lies."""
    if places.page is not None:
        place = tl.load(places.page + b).to(tl.int64)
        return place >= 0, place
    return tl.load(places.state.position + b) >= 0, b


@triton.jit
def _source(g, places):
    """Which key/value head of q, k, v and y has state g."""
    head = g
    if places.heads is not None:
        head = tl.load(places.heads + g)
    return head.to(tl.int64)


# Before the step: features of the queries, and the tokens that leave the window.


@triton.jit
def _query_features(q, phi, maps, places, tile, head, heads, batch, M: tl.constexpr, shape: tl.constexpr):
    """phi [B, H, F] of one query head of M sequences."""
    HALVES: tl.constexpr = shape.HALVES  # Triton 3.6 takes no field of a tuple as a static range
    source = _source(head // shape.REPEATS, places) * shape.REPEATS + head % shape.REPEATS
    first, stride = tile * M, tl.cast(q.b, tl.int64)
    q_MD = load_rows(q.x + source * q.h, first, stride, batch, 0, shape.D, M, shape.DB)
    weight_DP = load_weight(maps.q_weight, head, q_MD.dtype, shape)
    halves = features(project(q_MD, weight_DP, maps.q_bias, head, shape), shape)
    for half in tl.static_range(HALVES):
        store_rows(phi + head * shape.F + half * shape.P, halves[half], first, heads * shape.F, batch, 0, shape.P)


@triton.jit
def _fold_piece(k_NP, v_ND, S, P: tl.constexpr, D: tl.constexpr, PB: tl.constexpr, DB: tl.constexpr):
    """S += k^T v for S [P, D] in memory, in float32."""
    HALF: tl.constexpr = PB // 2
    if (PB * DB > _PIECE) and (PB > 16):
        left_NP, right_NP = tl.split(tl.permute(tl.reshape(k_NP, [k_NP.shape[0], 2, HALF]), [0, 2, 1]))
        LEFT: tl.constexpr = P if P < HALF else HALF
        _fold_piece(left_NP, v_ND, S, LEFT, D, HALF, DB)
        if P > HALF:
            _fold_piece(right_NP, v_ND, S + HALF * D, P - HALF, D, HALF, DB)
    else:
        S_PD = dot(tl.trans(k_NP), v_ND.to(tl.float32), load_matrix(S, 0, P, D, PB, DB))
        tl.debug_barrier()  # all threads have read S
        store_matrix(S, S_PD, 0, P, D)


@triton.jit
def _load_keys(pointer, row_N, there_N, column, kind: tl.constexpr, COLUMNS: tl.constexpr, shape: tl.constexpr):
    """Tile [N, COLUMNS] of keys or values in memory, 8 bits or not, in the type `kind`; zero where nothing is there."""
    if pointer.dtype.element_ty == tl.int8:
        return load_packed(pointer, row_N, there_N, column, shape.D, COLUMNS).to(kind)
    column_C = column + tl.arange(0, COLUMNS)
    mask = there_N[:, None] & (column_C < shape.D)[None, :]
    return tl.load(pointer + row_N[:, None] * shape.D + column_C[None, :], mask=mask, other=0.0).to(kind)


@triton.jit
def _fold(keys, values, maps, S, z, head, slot, first, kind: tl.constexpr, COUNT: tl.constexpr, shape: tl.constexpr):
    """Add COUNT tokens, of which the first has position `first` and lies in `slot`, to S and z of a head in memory."""
    HALVES: tl.constexpr = shape.HALVES
    P: tl.constexpr = shape.P
    D: tl.constexpr = shape.D
    ROWS: tl.constexpr = _FOLD_ROWS if (COUNT >= _FOLD_ROWS) and (shape.DB <= 128) else _FEW_FOLD_ROWS
    weight_DP = load_weight(maps.k_weight, head, kind, shape)
    for begin in tl.range(0, COUNT, ROWS):
        offset = begin + tl.arange(0, ROWS)
        k_ND = _load_keys(keys, slot + offset, offset < COUNT, 0, kind, shape.DB, shape)
        v_ND = _load_keys(values, slot + offset, offset < COUNT, 0, kind, shape.DB, shape)
        halves = features(project(k_ND, weight_DP, maps.k_bias, head, shape), shape)
        leaves = (offset < COUNT) & (first + offset >= shape.SINKS)
        for half in tl.static_range(HALVES):
            phi_NP = tl.where(leaves[:, None], halves[half], 0.0)
            z_P = load_vector(z + half * P, P, shape.PB) + tl.sum(phi_NP, 0)
            tl.debug_barrier()  # all threads have read z
            store_vector(z + half * P, z_P, P)
            _fold_piece(phi_NP, v_ND, S + half * P * D, P, D, shape.PB, shape.DB)


@triton.jit
def _clear(x, SIZE: tl.constexpr):
    """Zeros in memory."""
    for begin in tl.range(0, SIZE, _PIECE):
        i = begin + tl.arange(0, _PIECE)
        tl.store(x + i, tl.zeros([_PIECE], x.dtype.element_ty), mask=i < SIZE)


@triton.jit
def _leave(k, v, maps, places, b, head, kind: tl.constexpr, shape: tl.constexpr):
    """One state of a sequence, with the tokens that leave the window when the next one comes."""
    W: tl.constexpr = shape.W
    D: tl.constexpr = shape.D
    C: tl.constexpr = W if shape.SLIDING else W * shape.BLOCKS  # slots of the ring
    COUNT: tl.constexpr = 1 if shape.SLIDING else W
    state = places.state
    SIZE: tl.constexpr = shape.F * D
    strides, head_strides = places.strides, places.head_strides
    real, place = _place(b, places)
    if real:
        at = tl.load(state.position + b).to(tl.int32)
        g = (head // shape.SHARES).to(tl.int64)
        S = state.S + place * strides.S + g * head_strides.S + head % shape.SHARES * SIZE
        z = state.z + place * strides.z + g * head_strides.z + head % shape.SHARES * shape.F
        if places.page is not None:  # noqa: SIM102
            if at == 0:  # the page is new
                _clear(S, SIZE)
                _clear(z, shape.F)
                tl.debug_barrier()  # other threads read them next
        if W == 0:  # without a window the token itself
            h = _source(g, places)
            _fold(k.x + b * k.b + h * k.h, v.x + b * v.b + h * v.h, maps, S, z, head, 0, at, kind, COUNT, shape)
        elif (at >= C) & (at % COUNT == 0):
            ring = place * strides.ring + g * head_strides.ring
            _fold(state.k + ring, state.v + ring, maps, S, z, head, at % C, at - C, kind, COUNT, shape)


@triton.jit
def _changes(places, b_N, batch, shape: tl.constexpr):
    """1 for each sequence whose states `_leave` may change, else 0."""
    C: tl.constexpr = shape.W if shape.SLIDING else shape.W * shape.BLOCKS
    there_N = b_N < batch
    if shape.W == 0:
        return there_N.to(tl.int32)
    at_N = tl.load(places.state.position + b_N, mask=there_N, other=0).to(tl.int32)
    changes_N = (at_N >= C) & (at_N % (1 if shape.SLIDING else shape.W) == 0)
    if places.page is not None:
        changes_N = changes_N | (at_N == 0)
    return (there_N & changes_N).to(tl.int32)


@triton.jit(do_not_specialize=SIZES)
def prepare_kernel(
    q,
    k,
    v,
    phi,  # [B, H, F] of the queries
    maps,
    places,
    batch,
    kv_heads,
    M: tl.constexpr,  # sequences of a tile
    EARLY: tl.constexpr,
    shape: tl.constexpr,
):
    """The first programs: features of one query head of M sequences. Each other one: some of the states that change.

    Where sequences are at different places of their blocks, some of them fold in every step, and all wait for these.
    Numbered one after another, the states that change are dealt out to the programs; most have none of them to do.
    """
    wait_for_inputs(EARLY)
    tiles = tl.cdiv(batch, M)
    heads = kv_heads * shape.REPEATS
    program = tl.program_id(0)
    if program < tiles * heads:
        _query_features(q, phi, maps, places, program % tiles, program // tiles, heads, batch, M, shape)
    else:
        states = kv_heads * shape.SHARES
        number = program - tiles * heads
        end = 0
        for first in tl.range(0, batch, _SEQUENCES):
            changes_N = _changes(places, first + tl.arange(0, _SEQUENCES), batch, shape)
            begin = end
            end += tl.sum(changes_N, 0) * states
            if number < end:
                changed_N = tl.cumsum(changes_N, 0)
                while number < end:
                    before = tl.sum((changed_N <= (number - begin) // states).to(tl.int32), 0)
                    b = (first + before).to(tl.int64)
                    _leave(k, v, maps, places, b, (number - begin) % states, q.x.dtype.element_ty, shape)
                    number += tl.num_programs(0) - tiles * heads


# The step.


@triton.jit
def _add_token(q_MD, sees_M, k_D, v_V, acc, total, top, scale, softcap):
    """Running sums after one more key, of which rows see it or not."""
    score = scaled_scores(tl.sum(q_MD.to(tl.float32) * k_D.to(tl.float32)[None, :], 1), scale, softcap)
    score = tl.where(sees_M, score, float("-inf"))
    top, finite_top, fade = fade_sums(top, score)
    weight = tl.exp2(score - finite_top)
    total = total * fade + weight
    acc = acc * fade[:, None] + weight[:, None] * v_V.to(tl.float32)[None, :]
    return acc, total, top


@triton.jit
def _add_slots(
    q_MD,
    there_M,  # rows that are query heads
    keys,
    values,
    slot_N,
    seen_N,  # slots that are seen; others are not read
    first,  # column of the values
    acc,
    total,
    top,
    scale,
    softcap,
    COLUMNS: tl.constexpr,
    shape: tl.constexpr,
):
    """Running sums after a tile of the keys and values [slots, D] in memory."""
    k_ND = _load_keys(keys, slot_N, seen_N, 0, q_MD.dtype, shape.DB, shape)
    v_NV = _load_keys(values, slot_N, seen_N, first, q_MD.dtype, COLUMNS, shape)
    sees_MN = seen_N[None, :] & there_M[:, None]
    return add_keys(q_MD, sees_MN, k_ND, v_NV, acc, total, top, scale, softcap)


@triton.jit
def _store_token(key, value, k_D, v_V, factor_k, factor_v, column_V, own, D: tl.constexpr):
    """The `own` first entries of the new key, and some columns of the value; in 8 bits with their factors."""
    column, one = tl.arange(0, k_D.shape[0]), tl.arange(0, 1)
    tl.store(key + column, k_D.to(key.dtype.element_ty), mask=column < own)
    tl.store(value + column_V, v_V.to(value.dtype.element_ty), mask=column_V < D)
    if key.dtype.element_ty == tl.int8:
        tl.store((key + D).to(tl.pointer_type(tl.float32)) + one, factor_k, mask=one < own)
        tl.store((value + D).to(tl.pointer_type(tl.float32)) + one, factor_v, mask=one < own)


@triton.jit
def _add_state(phi_M, there_M, S, z, column_V, acc, total, BF: tl.constexpr, shape: tl.constexpr):
    """Running sums after the state S [F, D], z [F] in memory; `phi_M` are the addresses of the queries' features,
    in whose type S is multiplied."""
    F: tl.constexpr = shape.F
    D: tl.constexpr = shape.D
    for begin in tl.range(0, F, BF):
        f = begin + tl.arange(0, BF)
        phi_MF = tl.load(phi_M[:, None] + f[None, :], mask=there_M[:, None] & (f < F)[None, :], other=0.0)
        z_F = tl.load(z + f, mask=f < F, other=0.0)
        S_FV = tl.load(
            S + f[:, None] * D + column_V[None, :], mask=(f < F)[:, None] & (column_V < D)[None, :], other=0.0
        )
        total += tl.sum(phi_MF.to(tl.float32) * z_F[None, :], 1)
        acc = dot(phi_MF, S_FV.to(phi_MF.dtype), acc)
    return acc, total


@triton.jit(do_not_specialize=SIZES)
def step_kernel(
    q,
    k,
    v,
    phi,  # [B, H, F] of the queries, or None
    y,
    window_factor,
    sink_logits,
    places,
    kv_heads,
    scale,  # of the scores, times log2(e)
    softcap,  # of the scores, times log2(e), or None
    CAP: tl.constexpr,  # the linear length cap
    SPLIT: tl.constexpr,  # programs that divide the columns of the values
    M: tl.constexpr,  # rows of a tile, at least the query heads of a key/value head
    BN: tl.constexpr,
    BF: tl.constexpr,
    EARLY: tl.constexpr,
    shape: tl.constexpr,
):
    """One program: one token of one sequence, the query heads of one key/value head, some columns of the output."""
    wait_for_inputs(EARLY)
    W: tl.constexpr = shape.W
    SINKS: tl.constexpr = shape.SINKS
    F: tl.constexpr = shape.F
    D: tl.constexpr = shape.D
    DB: tl.constexpr = shape.DB
    REPEATS: tl.constexpr = shape.REPEATS
    SLIDING: tl.constexpr = shape.SLIDING
    SHARES: tl.constexpr = shape.SHARES
    C: tl.constexpr = W if SLIDING else W * shape.BLOCKS  # slots of the ring
    V: tl.constexpr = DB // SPLIT  # columns of the values
    PACKED: tl.constexpr = places.state.k.dtype.element_ty == tl.int8
    ROW: tl.constexpr = D + 4 if PACKED else D  # bytes or entries of a key in memory
    part = tl.program_id(0) % SPLIT
    g = tl.program_id(0) // SPLIT % kv_heads
    b = (tl.program_id(0) // SPLIT // kv_heads).to(tl.int64)
    row = tl.arange(0, M)
    there = row < REPEATS
    row_h = g * REPEATS + row
    state, strides, head_strides, own_g = places.state, places.strides, places.head_strides, g.to(tl.int64)
    source = _source(g, places)
    source_h = source * REPEATS + row
    column = tl.arange(0, DB)
    first = part * V
    column_V = first + tl.arange(0, V)
    in_tile = there[:, None] & (column < D)[None, :]
    q_MD = tl.load(q.x + b * q.b + source_h[:, None] * q.h + column[None, :], mask=in_tile, other=0.0)
    acc = tl.zeros([M, V], tl.float32)
    total = tl.zeros([M], tl.float32)

    real, place = _place(b, places)
    if real:
        # The upper half of the number counts the programs that are done with this sequence, see below.
        at = tl.load(state.position + b).to(tl.int32)
        new_k, new_v = k.x + b * k.b + source * k.h, v.x + b * v.b + source * v.h
        k_D = tl.load(new_k + column, mask=column < D, other=0.0)
        v_V = tl.load(new_v + column_V, mask=column_V < D, other=0.0)
        stored_k, stored_v, factor_k, factor_v = k_D, v_V, 0.0, 0.0
        if PACKED:  # the token itself is rounded, too, as all that a pass reads
            factor_k = factor_of(k_D.to(tl.float32))
            factor_v = factor_of(tl.load(new_v + column, mask=column < D, other=0.0).to(tl.float32))
            stored_k, stored_v = levels_of(k_D.to(tl.float32), factor_k), levels_of(v_V.to(tl.float32), factor_v)
            k_D, v_V = (stored_k * factor_k).to(q_MD.dtype), (stored_v * factor_v).to(q_MD.dtype)
        ring = place * strides.ring + own_g * head_strides.ring
        sink = place * strides.sinks + own_g * head_strides.sinks
        if PACKED:  # else they would be read byte by byte
            ring, sink = tl.multiple_of(ring, 4), tl.multiple_of(sink, 4)
        ring_k, ring_v, sink_k, sink_v = state.k + ring, state.v + ring, state.sink_k + sink, state.sink_v + sink

        # Exact keys: this token from the arguments, first tokens from the sinks, then the window.
        if W > 0 or SINKS > 0:
            top = tl.full([M], float("-inf"), tl.float32)
            if sink_logits is not None:
                top = tl.where(there, tl.load(sink_logits + row_h, mask=there, other=0.0).to(tl.float32) * _LOG2_E, top)
                total += 1.0
            sees = there & ((W > 0) | (at < SINKS))
            acc, total, top = _add_token(q_MD, sees, k_D, v_V, acc, total, top, scale, softcap)
            if SINKS > 0:
                slot_S = tl.arange(0, shape.SB)
                seen_S = (slot_S < SINKS) & (slot_S < at)
                acc, total, top = _add_slots(
                    q_MD, there, sink_k, sink_v, slot_S, seen_S, first, acc, total, top, scale, softcap, V, shape
                )
            if W > 0:
                start = tl.maximum(at - W + 1 if SLIDING else (at // W - shape.BLOCKS + 1) * W, SINKS)
                for begin in tl.range(0, C, BN):
                    slot = begin + tl.arange(0, BN)
                    held = at - 1 - (at - 1 + C - slot) % C  # position of the token in the slot; negative: none
                    seen_N = (slot < C) & (held >= start)
                    acc, total, top = _add_slots(
                        q_MD, there, ring_k, ring_v, slot, seen_N, first, acc, total, top, scale, softcap, V, shape
                    )
            weighs = tl.sigmoid(tl.load(window_factor + row_h, mask=there, other=0.0).to(tl.float32))
            if CAP > 0:
                weighs *= tl.maximum((at + 1).to(tl.float32) / CAP, 1.0)
            acc *= weighs[:, None]
            total *= weighs

        if shape.MAP != "none":
            for s in tl.range(0, SHARES):
                mine = there if SHARES == 1 else row == s
                S = state.S + place * strides.S + own_g * head_strides.S + s * F * D
                z = state.z + place * strides.z + own_g * head_strides.z + s * F
                phi_M = phi + (b * kv_heads * REPEATS + row_h) * F
                acc, total = _add_state(phi_M, mine, S, z, column_V, acc, total, BF, shape)

        tl.debug_barrier()  # all threads have read the slot and the position
        own = tl.where(part == 0, D, 0)  # one of the programs writes the keys
        if W > 0:
            slot = at % C * ROW
            _store_token(ring_k + slot, ring_v + slot, stored_k, stored_v, factor_k, factor_v, column_V, own, D)
        if (SINKS > 0) & (at < SINKS):
            slot = at * ROW
            _store_token(sink_k + slot, sink_v + slot, stored_k, stored_v, factor_k, factor_v, column_V, own, D)
        # The position may change only when all programs of the sequence have read it: each counts itself in the
        # upper half, and the last one writes the new position over the count.
        if places.page is None:
            done = tl.atomic_add(state.position + b, 4294967296) // 4294967296
            if done == kv_heads * SPLIT - 1:
                tl.store(state.position + b, (at + 1).to(tl.int64))

    out = acc / tl.maximum(total, FLOOR)[:, None]
    address = y.x + b * y.b + source_h[:, None] * y.h + column_V[None, :]
    tl.store(address, out.to(y.x.dtype.element_ty), mask=there[:, None] & (column_V < D)[None, :])
