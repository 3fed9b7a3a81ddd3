"""One token of hybrid attention with a state, in two launches: the decoding step on a GPU.

The first has three kinds of programs, none of which waits for another. Some make the features of the queries, many
sequences a program so that they share the weights; some add to S and z the tokens that leave the window; some make
softmax sums of the exact keys (this token, sinks, ring), see `softmax_step`. In the second launch a program takes one
sequence, one key/value head and some columns of the values: it joins those sums and adds what the state gives, which
it reads once for all of the head's queries. Then it writes the token into ring and sinks.

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
    launch,
    next_power_of_2,
    padded,
)
from lolcats.ops.hybrid_attention.kernels.softmax_step import (
    Sums,
    add_split,
    add_tokens,
    join_splits,
    joined_splits,
    launch_of_splits,
    load_tokens,
    reads_words,
    splits_of_a_row,
    store_split,
)
from lolcats.ops.hybrid_attention.kernels.tiles import (
    FLOOR,
    dot,
    factor_of,
    features,
    half_features,
    levels_of,
    load_matrix,
    load_rows,
    load_vector,
    load_weight,
    project,
    scaled_scores,
    store_matrix,
    store_rows,
    store_vector,
)
from lolcats.ops.hybrid_attention.state import HybridParams, HybridState, PagedStep

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # other devices, and older versions
    gdc_launch_dependents = gdc_wait = None

# Programs divide the window's keys, and the columns of the values, until there are so many: two for each multiprocessor
# of a large GPU. Windows are of nearly the same length, so more would gain nothing.
ENOUGH_PROGRAMS = 264
# Programs that fold, at most: two for each multiprocessor. Those that find nothing to do take their time, too.
MOST_FOLDING = 264
# Rows of a tile that tensor cores take, and columns of the narrowest.
LEAST = 16
_LEAST = tl.constexpr(LEAST)
# Sequences of a tile of features.
MOST_SEQUENCES = 64
# Columns of a part of S, to which a program adds `LEAST` tokens at once. All wait for the sequences that fold.
FOLD_COLUMNS = 32
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

    page: int32 [B], each sequence's place among the states, 0 if it does not exist; None: its own number.
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
    paged: PagedStep | None = None,
    launch: Any = launch,
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`, T = 1; or of sequences whose states are in pages. Nothing waits for the device.

    Weights may have any floating type. Tensors of `state` that are not contiguous are copied, but those of pages are
    not; the returned state has the copies.

    Args:
        state: of pages the views of `pages.StatePages`, dense in all axes but the first two, and the tokens that each
            sequence has seen: at 0 what its page holds is not used. These positions are not changed.
        paged: which pages, and where the outputs go.
        launch: see `operands.Launches`.
    """
    page_B, y_BH1D, heads_G = paged or (None, None, None)
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
    splits = splits_of_a_row(batch * kv_heads, config.capacity, ENOUGH_PROGRAMS) if config.has_softmax else 0
    sums = Sums.empty(q, heads, splits)
    parts, group = programs_of_a_head(batch * kv_heads, shape.DB), padded(shape.REPEATS)
    prepare, step = _settings(q, state.k, shape.DB, many=parts == 1)
    phi, tiles, folding, tile = None, 0, 0, LEAST
    if config.feature_map is not None:
        phi = q.new_empty((batch, heads, shape.F), dtype=torch.bfloat16 if q.dtype.itemsize == 2 else torch.float32)
        tile = min(max(next_power_of_2(batch), LEAST), MOST_SEQUENCES)
        parts_of_S = shape.HALVES * cdiv(head_dim, FOLD_COLUMNS)
        tiles, folding = cdiv(batch, tile), min(batch * state_heads * parts_of_S, MOST_FOLDING)
    launch(
        prepare_kernel,
        (tiles * heads + folding + batch * kv_heads * splits,),
        *rows[:3],
        phi,
        sums,
        FeatureMaps(*maps),
        places,
        batch,
        kv_heads,
        tiles,
        folding,
        splits,
        in_log2(params.scale_of(q)),
        in_log2(params.softcap),
        MS=tile,
        MH=group,
        V=FOLD_COLUMNS,
        **prepare,
        shape=shape,
        **early_launch(q.device),
    )
    launch(
        step_kernel,
        (batch * kv_heads * parts,),
        *rows[1:],
        phi,
        sums,
        window_factor,
        sink_logits,
        places,
        kv_heads,
        splits,
        CAP=config.linear_length_cap,
        PARTS=parts,
        M=group,
        BS=joined_splits(group, shape.DB // parts),
        **step,
        shape=shape,
        **early_launch(q.device),
    )
    return y, state


def _settings(q: Tensor, keys: Tensor, columns: int, *, many: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Keywords of the two launches: the fastest of some ten on an H200, head_dim 64 and 128."""
    prepare = launch_of_splits(q)
    if q.dtype == torch.float32:
        return prepare, {"BF": 32, "num_warps": 4, "num_stages": 2}
    if reads_words(q, keys):
        prepare = {"BN": 128, "num_warps": 4, "num_stages": 2, "maxnreg": 168}
    elif columns <= 64 and many:
        prepare["maxnreg"] = 128
    if many:
        return prepare, {"BF": 32, "num_warps": 2, "num_stages": 3}
    return prepare, {"BF": 128 if columns == 128 else 64, "num_warps": 4, "num_stages": 2}


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
        return place > 0, place
    return tl.load(places.state.position + b) >= 0, b


@triton.jit
def _source(g, places):
    """Which key/value head of q, k, v and y has state g."""
    head = g
    if places.heads is not None:
        head = tl.load(places.heads + g)
    return head.to(tl.int64)


# The first launch: features of the queries, the tokens that leave the window, sums of exact keys.


@triton.jit
def _fold(keys, values, maps, S, z, head, span, fresh, part, kind: tl.constexpr, V: tl.constexpr, shape: tl.constexpr):
    """Add tokens (slot of the first, its position, how many) to a part of S of a head in memory, or to zeros.

    A part is V columns of one half, which stay in registers; the first of each half has that of z."""
    slot, first, count = span
    P: tl.constexpr = shape.P
    D: tl.constexpr = shape.D
    half, column = part % shape.HALVES, part // shape.HALVES * V
    S, z = S + half * P * D, z + half * P
    S_PV = tl.where(fresh, 0.0, load_matrix(S, column, P, D, shape.PB, V))
    z_P = tl.where(fresh, 0.0, load_vector(z, P, shape.PB))
    weight_DP = load_weight(maps.k_weight, head, kind, shape)
    for begin in tl.range(0, count, _LEAST):
        offset = begin + tl.arange(0, _LEAST)
        k_ND, k_factor_N = load_tokens(keys, slot + offset, offset < count, D, D, shape.DB)
        v_NV, v_factor_N = load_tokens(values, slot + offset, offset < count, D, D, V, column)
        if k_ND.dtype == tl.int8:
            k_ND = (k_ND.to(tl.float32) * k_factor_N[:, None]).to(kind)
            v_NV = (v_NV.to(tl.float32) * v_factor_N[:, None]).to(kind)
        x_NP = project(k_ND, weight_DP, maps.k_bias, head, shape)
        leaves_N1 = ((offset < count) & (first + offset >= shape.SINKS))[:, None]
        phi_NP = tl.where(leaves_N1, half_features(tl.where(half == 0, x_NP, -x_NP), shape), 0.0)
        z_P += tl.sum(phi_NP, 0)
        S_PV = dot(tl.trans(phi_NP), v_NV.to(tl.float32), S_PV)
    store_matrix(S, S_PV, column, P, D)
    if column == 0:
        store_vector(z, z_P, P)


@triton.jit
def _leave(k, v, maps, places, b, head, part, kind: tl.constexpr, V: tl.constexpr, shape: tl.constexpr):
    """A part of one state of a sequence, with the tokens that leave the window when the next one comes."""
    W: tl.constexpr = shape.W
    C: tl.constexpr = W if shape.SLIDING else W * shape.BLOCKS  # slots of the ring
    COUNT: tl.constexpr = 1 if shape.SLIDING else W
    state = places.state
    strides, head_strides = places.strides, places.head_strides
    real, place = _place(b, places)
    if real:
        at = tl.load(state.position + b).to(tl.int32)
        g = (head // shape.SHARES).to(tl.int64)
        S = state.S + place * strides.S + g * head_strides.S + head % shape.SHARES * shape.F * shape.D
        z = state.z + place * strides.z + g * head_strides.z + head % shape.SHARES * shape.F
        fresh = (at == 0) & (places.page is not None)  # a page that another sequence may have had
        if W == 0:  # without a window the token itself
            h = _source(g, places)
            keys, values = k.x + b * k.b + h * k.h, v.x + b * v.b + h * v.h
            _fold(keys, values, maps, S, z, head, (0, at, 1), fresh, part, kind, V, shape)
        else:
            ring = place * strides.ring + g * head_strides.ring
            count = tl.where((at >= C) & (at % COUNT == 0), COUNT, 0)
            leaving = at % C, at - C, count
            _fold(state.k + ring, state.v + ring, maps, S, z, head, leaving, fresh, part, kind, V, shape)


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


@triton.jit
def _rounded(x_D, places):
    """A new key or value, where the state keeps 8 bits as these say."""
    if places.state.k.dtype.element_ty == tl.int8:
        factor = factor_of(x_D.to(tl.float32))
        return (levels_of(x_D.to(tl.float32), factor) * factor).to(x_D.dtype)
    return x_D


@triton.jit
def _ring_and_sinks(places, place, g):
    """Where a key/value head's ring and sinks begin in memory."""
    ring = place * places.strides.ring + g.to(tl.int64) * places.head_strides.ring
    sink = place * places.strides.sinks + g.to(tl.int64) * places.head_strides.sinks
    if places.state.k.dtype.element_ty == tl.int8:  # else they would be read byte by byte
        ring, sink = tl.multiple_of(ring, 4), tl.multiple_of(sink, 4)
    return ring, sink


@triton.jit
def _sum_split(
    q, k, v, sums, places, number, kv_heads, splits, scale, softcap, M: tl.constexpr, BN: tl.constexpr, shape
):
    """Softmax sums of the query heads of one key/value head over one of the splits of the window; the first split has
    the token itself, from the arguments, and the sinks, too."""
    W: tl.constexpr = shape.W
    SINKS: tl.constexpr = shape.SINKS
    REPEATS: tl.constexpr = shape.REPEATS
    D: tl.constexpr = shape.D
    DB: tl.constexpr = shape.DB
    split = number % splits
    g = number // splits % kv_heads
    b = (number // splits // kv_heads).to(tl.int64)
    real, place = _place(b, places)
    if real:
        at = tl.load(places.state.position + b).to(tl.int32)
        source = _source(g, places)
        first_head = source * REPEATS
        q_MD = load_rows(q.x + b * q.b, first_head, tl.cast(q.h, tl.int64), first_head + REPEATS, 0, D, M, DB)
        ring, sink = _ring_and_sinks(places, place, g)
        acc = tl.zeros([M, DB], tl.float32)
        total = tl.zeros([M], tl.float32)
        top = tl.full([M], float("-inf"), tl.float32)
        if split == 0:
            if (W > 0) | (at < SINKS):
                k_D = _rounded(load_vector(k.x + b * k.b + source * k.h, D, DB), places)
                v_D = _rounded(load_vector(v.x + b * v.b + source * v.h, D, DB), places)
                score = tl.sum(q_MD.to(tl.float32) * k_D.to(tl.float32)[None, :], 1)
                top = scaled_scores(score, scale, softcap)
                total += 1.0
                acc += v_D.to(tl.float32)[None, :]
            if SINKS > 0:
                slot_S = tl.arange(0, shape.SB)
                seen_S = (slot_S < SINKS) & (slot_S < at)
                sink_k, sink_v = places.state.sink_k + sink, places.state.sink_v + sink
                acc, total, top = add_tokens(
                    q_MD, sink_k, sink_v, slot_S, seen_S, D, D, acc, total, top, scale, softcap, D
                )
        if W > 0:
            start = tl.maximum(at - W + 1 if shape.SLIDING else (at // W - shape.BLOCKS + 1) * W, SINKS)
            slots = W if shape.SLIDING else W * shape.BLOCKS
            ring_k, ring_v = places.state.k + ring, places.state.v + ring
            acc, total, top = add_split(
                q_MD, ring_k, ring_v, D, D, split, splits, at - 1, start, slots, acc, total, top, scale, softcap, BN, D
            )
        store_split(sums, (b * kv_heads + g) * REPEATS, split, splits, acc, total, top, REPEATS, D)


@triton.jit(do_not_specialize=SIZES)
def prepare_kernel(
    q,
    k,
    v,
    phi,  # [B, H, F] of the queries
    sums,
    maps,
    places,
    batch,
    kv_heads,
    tiles,
    folding,  # programs that fold
    splits,
    scale,  # of the scores, times log2(e)
    softcap,  # of the scores, times log2(e), or None
    MS: tl.constexpr,  # sequences of a tile of features
    MH: tl.constexpr,  # rows of a tile of heads, at least the query heads of a key/value head
    V: tl.constexpr,  # columns of a part of S
    BN: tl.constexpr,
    EARLY: tl.constexpr,
    shape: tl.constexpr,
):
    """The first programs: features of one query head of many sequences. Then those that fold, then splits of keys.

    Where sequences are at different places of their blocks, some of them fold in every step, and all wait for these.
    Numbered one after another, the states that change are dealt out to the programs; most have none of them to do.
    """
    wait_for_inputs(EARLY)
    heads = kv_heads * shape.REPEATS
    program = tl.program_id(0)
    other = program - tiles * heads
    if other >= folding:
        if (shape.W > 0) | (shape.SINKS > 0):
            _sum_split(q, k, v, sums, places, other - folding, kv_heads, splits, scale, softcap, MH, BN, shape)
    elif shape.MAP != "none":
        if other < 0:
            HALVES: tl.constexpr = shape.HALVES  # Triton 3.6 takes no field of a tuple as a static range
            head, first_b = program // tiles, program % tiles * MS
            source = _source(head // shape.REPEATS, places) * shape.REPEATS + head % shape.REPEATS
            q_MD = load_rows(q.x + source * q.h, first_b, tl.cast(q.b, tl.int64), batch, 0, shape.D, MS, shape.DB)
            weight_DP = load_weight(maps.q_weight, head, q_MD.dtype, shape)
            halves = features(project(q_MD, weight_DP, maps.q_bias, head, shape), shape)
            for half in tl.static_range(HALVES):
                phi_half = phi + head * shape.F + half * shape.P
                store_rows(phi_half, halves[half], first_b, heads * shape.F, batch, 0, shape.P)
        else:
            PARTS: tl.constexpr = shape.HALVES * ((shape.D + V - 1) // V)
            states = kv_heads * shape.SHARES * PARTS
            number = other
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
                        state = (number - begin) % states
                        _leave(k, v, maps, places, b, state // PARTS, state % PARTS, q.x.dtype.element_ty, V, shape)
                        number += folding


# The second launch: the output.


@triton.jit
def _store_token(to, x_D, D: tl.constexpr):
    """A new key or value into its slot, in 8 bits with its factor."""
    if to.dtype.element_ty == tl.int8:
        factor = factor_of(x_D.to(tl.float32))
        x_D = levels_of(x_D.to(tl.float32), factor)
        tl.store((to + D).to(tl.pointer_type(tl.float32)), factor)
    store_vector(to, x_D.to(to.dtype.element_ty), D)


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
    k,
    v,
    y,
    phi,  # [B, H, F] of the queries, or None
    sums,
    window_factor,
    sink_logits,
    places,
    kv_heads,
    splits,
    CAP: tl.constexpr,  # the linear length cap
    PARTS: tl.constexpr,  # programs that divide the columns of the values
    M: tl.constexpr,  # rows of a tile, at least the query heads of a key/value head
    BS: tl.constexpr,
    BF: tl.constexpr,
    EARLY: tl.constexpr,
    shape: tl.constexpr,
):
    """One program: one token of one sequence, the query heads of one key/value head, some columns of the output."""
    wait_for_inputs(EARLY)
    W: tl.constexpr = shape.W
    D: tl.constexpr = shape.D
    REPEATS: tl.constexpr = shape.REPEATS
    V: tl.constexpr = shape.DB // PARTS  # columns of the values
    part = tl.program_id(0) % PARTS
    g = tl.program_id(0) // PARTS % kv_heads
    b = (tl.program_id(0) // PARTS // kv_heads).to(tl.int64)
    row = tl.arange(0, M)
    there = row < REPEATS
    row_h = g * REPEATS + row
    row_bh = b * kv_heads * REPEATS + row_h
    state, strides, head_strides, own_g = places.state, places.strides, places.head_strides, g.to(tl.int64)
    source = _source(g, places)
    column_V = part * V + tl.arange(0, V)
    acc = tl.zeros([M, V], tl.float32)
    total = tl.zeros([M], tl.float32)

    real, place = _place(b, places)
    if real:
        # The upper half of the number counts the programs that are done with this sequence, see below.
        at = tl.load(state.position + b).to(tl.int32)
        if (W > 0) | (shape.SINKS > 0):
            acc, total = join_splits(sums, row_bh, there, splits, sink_logits, row_h, column_V, D, BS)
            weighs = tl.sigmoid(tl.load(window_factor + row_h, mask=there, other=0.0).to(tl.float32))
            if CAP > 0:
                weighs *= tl.maximum((at + 1).to(tl.float32) / CAP, 1.0)
            acc *= weighs[:, None]
            total *= weighs

        if shape.MAP != "none":
            for s in tl.range(0, shape.SHARES):
                mine = there if shape.SHARES == 1 else row == s
                S = state.S + place * strides.S + own_g * head_strides.S + s * shape.F * D
                z = state.z + place * strides.z + own_g * head_strides.z + s * shape.F
                acc, total = _add_state(phi + row_bh * shape.F, mine, S, z, column_V, acc, total, BF, shape)

        if part == 0:  # one of the programs writes the token
            new_k = load_vector(k.x + b * k.b + source * k.h, D, shape.DB)
            new_v = load_vector(v.x + b * v.b + source * v.h, D, shape.DB)
            ROW: tl.constexpr = D + 4 if state.k.dtype.element_ty == tl.int8 else D
            ring, sink = _ring_and_sinks(places, place, g)
            if W > 0:
                C: tl.constexpr = W if shape.SLIDING else W * shape.BLOCKS
                slot = ring + at % C * ROW
                _store_token(state.k + slot, new_k, D)
                _store_token(state.v + slot, new_v, D)
            if at < shape.SINKS:
                slot = sink + at * ROW
                _store_token(state.sink_k + slot, new_k, D)
                _store_token(state.sink_v + slot, new_v, D)
        # The position may change only when all programs of the sequence have read it: each counts itself in the
        # upper half, and the last one writes the new position over the count.
        if places.page is None:
            tl.debug_barrier()  # all threads have read it
            done = tl.atomic_add(state.position + b, 4294967296) // 4294967296
            if done == kv_heads * PARTS - 1:
                tl.store(state.position + b, (at + 1).to(tl.int64))

    out = acc / tl.maximum(total, FLOOR)[:, None]
    address = y.x + b * y.b + (source * REPEATS + row)[:, None] * y.h + column_V[None, :]
    tl.store(address, out.to(y.x.dtype.element_ty), mask=there[:, None] & (column_V < D)[None, :])
