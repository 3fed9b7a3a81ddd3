"""States before every chunk on Hopper: programs walk segments of a sequence, from sums of the segments before them.

`walk_kernel` needs sequences and heads that fill the device. Here a first launch adds up parts of all segments but the
last, a second one starts each segment from these sums in float32 and stores a state per chunk. States are written once,
keys and values read twice (once where a segment is a whole sequence); sums and scan over all chunks write states twice
and read them once. One warp copies keys and values ahead of two warpgroups, one for each half of the features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lolcats.ops.hybrid_attention.kernels.forward_gluon import (
    NARROW,
    ROW_BLOCK,
    STORED,
    TILE,
    WIDE,
    TileKernel,
    copy_tile,
    half_features,
    takes_heads,
)
from lolcats.ops.hybrid_attention.kernels.launch import cdiv, multiprocessors
from lolcats.ops.hybrid_attention.kernels.shape import Operands

# From this many chunks of all sequences and state heads on: with 4096 a forward pass on an H100 took 12 % less time,
# with 2048 4 % more, with 512 21 %: its launches wait for each other.
_SEGMENT_CHUNKS = 4096
_SHORTEST = 4  # chunks of a segment, or of a part of one
_STAGES = gl.constexpr(4)
_W = gl.constexpr(8)  # barrier of the weights, after those of keys and of values


def is_segmented(x: Operands) -> bool:
    """Whether `segment_kernel` makes the states of this call, of those that `is_special` knows."""
    shape = x.shape
    is_near = not shape.SLIDING and shape.WINDOW == 2 * shape.C == 2 * shape.W
    are_rows = x.sequences in (0, x.sizes.segments)
    are_many = x.sizes.chunk_rows * x.sizes.kv_heads * x.sizes.chunks >= _SEGMENT_CHUNKS
    return is_near and are_rows and are_many and takes_heads(x)


def split(rows: int, chunks: int, programs: int) -> tuple[int, int, int]:
    """How many segments each of `rows` has, their chunks, and parts of a segment in the first launch."""
    count = max(1, min(programs // rows, chunks // _SHORTEST))
    length, parts = cdiv(chunks, count), 1
    if count > 1:
        parts = max(1, min(programs // (rows * (count - 1)), length // _SHORTEST))
        length = cdiv(length, parts) * parts
        count = cdiv(chunks, length)
    return count, length, parts


def segment_states(x: Operands, S: Tensor, z: Tensor, end_S: Tensor | None, end_z: Tensor | None) -> None:
    """Fill S and z with the states before every chunk, end_S and end_z with the sums of all that left the window."""
    rows, chunks = x.sizes.chunk_rows * x.sizes.kv_heads, x.sizes.chunks
    count, length, parts = split(rows, chunks, multiprocessors(x.q.device))
    sums = (count - 1) * parts
    sum_S = sum_z = None
    if sums:
        sum_S = x.plan.empty((rows, sums, *S.shape[3:]), torch.float32)
        sum_z = x.plan.empty((rows, sums, S.shape[3]), torch.float32)
    # `warp_specialize` takes no None: z stands for what is not read.
    given = [z if tensor is None else tensor for tensor in (sum_S, sum_z, x.S, x.z, end_S, end_z)]
    tensors = (x.k, x.v, x.maps.k_weight, S, z, *given)
    sizes = (chunks, x.sizes.kv_heads)
    if sums:
        constants = {"SUMS": True, "HAS_FIRST": False, "HAS_END": False, "num_warps": 4}
        cut = (length // parts, sums, 1, sums)
        x.plan.launch(SEGMENT_KERNEL, (rows * sums,), *tensors, *sizes, *cut, at=1, **constants)
    constants = {"SUMS": False, "HAS_FIRST": x.S is not None, "HAS_END": end_S is not None, "num_warps": 4}
    cut = (length, count, parts, sums)
    x.plan.launch(SEGMENT_KERNEL, (rows * count,), *tensors, *sizes, *cut, at=0, **constants)


@gluon.jit
def _copy(k, v, w, tiles, full, empty, b, g, first, stop):
    k_tiles, v_tiles, w_tile, _ = tiles
    mbarrier.expect(full.index(_W), 128 * 64 * 2)
    tma.async_copy_global_to_shared(w, [g * 128, 0], full.index(_W), w_tile.index(0))
    for c in range(first, stop):
        i = c - first
        slot = i % _STAGES
        free = (i // _STAGES & 1) ^ 1
        at_v = _STAGES + slot
        copy_tile(k, [b, g, c * 64, 0], k_tiles.index(slot), full.index(slot), empty.index(slot), free)
        copy_tile(v, [b, g, c * 64, 0], v_tiles.index(slot), full.index(at_v), empty.index(at_v), free)


@gluon.jit
def _walk(
    tensors,
    tiles,
    full,
    empty,
    where,
    SUMS: gl.constexpr,
    HAS_FIRST: gl.constexpr,
    HAS_END: gl.constexpr,
    HALF: gl.constexpr,
):
    """One half of the features, by one warpgroup: keys of the chunks from `first` to `stop`, states up to `last`.

    `index`: of the sum to write, or how many to begin with.
    """
    S, z, sum_S, sum_z, first_S, first_z, end_S, end_z = tensors
    k_tiles, v_tiles, w_tile, phi_tiles = tiles
    row, chunks, first, stop, last, index, sums = where
    narrow: gl.constexpr = NARROW
    wide: gl.constexpr = WIDE
    stored: gl.constexpr = STORED
    dtype: gl.constexpr = gl.bfloat16
    at_z = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, narrow))
    feature = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    at_S = feature[:, None] * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, wide))[None, :]
    feature = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, stored))
    at_stored = feature[:, None] * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, stored))[None, :]
    S_PD = gl.zeros([64, 128], gl.float32, layout=wide)
    z_P = gl.zeros([64], gl.float32, layout=gl.SliceLayout(0, narrow))
    at_row = row.to(gl.int64)
    if not SUMS:
        if HAS_FIRST:
            S_PD += gl.load(first_S + at_row * 16384 + at_S)
            z_P += gl.load(first_z + at_row * 128 + at_z)
        for i in range(0, index):
            S_PD += gl.load(sum_S + (at_row * sums + i) * 16384 + at_S)
            z_P += gl.load(sum_z + (at_row * sums + i) * 128 + at_z)
    mbarrier.wait(full.index(_W), 0)
    for c in range(first, stop):
        i = c - first
        slot = i % _STAGES
        ready = i // _STAGES & 1
        mbarrier.wait(full.index(slot), ready)
        u = gl.zeros([64, 64], gl.float32, layout=narrow)
        u = warpgroup_mma(k_tiles.index(slot), w_tile.index(0), u, use_acc=False, is_async=True)
        u = warpgroup_mma_wait(0, deps=[u])
        mbarrier.arrive(empty.index(slot), count=1)
        if not SUMS:
            at_chunk = at_row * chunks + c
            gl.store(S + at_chunk * 16384 + at_stored, gl.convert_layout(S_PD.to(dtype), stored))
            gl.store(z + at_chunk * 128 + at_z, z_P)
        phi_CP = half_features(u if HALF == 0 else -u, 1.0)
        z_P += gl.sum(phi_CP, 0)
        phi_tiles.index(HALF).store(phi_CP.to(dtype))
        fence_async_shared()
        mbarrier.wait(full.index(_STAGES + slot), ready)
        phi_PC = phi_tiles.index(HALF).permute((1, 0))
        S_PD = warpgroup_mma(phi_PC, v_tiles.index(slot), S_PD, is_async=True)
        S_PD = warpgroup_mma_wait(0, deps=[S_PD])
        mbarrier.arrive(empty.index(_STAGES + slot), count=1)
    if SUMS:
        gl.store(sum_S + (at_row * sums + index) * 16384 + at_S, S_PD)
        gl.store(sum_z + (at_row * sums + index) * 128 + at_z, z_P)
    else:
        rounded = gl.convert_layout(S_PD.to(dtype), stored)
        for c in range(stop, last):
            at_chunk = at_row * chunks + c
            gl.store(S + at_chunk * 16384 + at_stored, rounded)
            gl.store(z + at_chunk * 128 + at_z, z_P)
        if HAS_END:  # noqa: SIM102  (known when it is compiled)
            if last == chunks:
                gl.store(end_S + at_row * 16384 + at_S, S_PD)
                gl.store(end_z + at_row * 128 + at_z, z_P)


@gluon.jit(do_not_specialize=["chunks", "kv_heads", "length", "count", "parts", "sums"])
def segment_kernel(
    k,
    v,
    w,
    S,
    z,
    sum_S,
    sum_z,
    first_S,
    first_z,
    end_S,
    end_z,
    chunks,
    kv_heads,
    length,
    count,
    parts,
    sums,
    SUMS: gl.constexpr,
    HAS_FIRST: gl.constexpr,
    HAS_END: gl.constexpr,
):
    """One program: `length` chunks, one of `count` segments of a sequence and head.

    Args:
        parts: how many sums each segment before it has.
        sums: how many the sequence has.
        SUMS: write one of them, and no states.
    """
    dtype: gl.constexpr = gl.bfloat16
    tile: gl.constexpr = TILE
    k_tiles = gl.allocate_shared_memory(dtype, [_STAGES, 64, 128], tile)
    v_tiles = gl.allocate_shared_memory(dtype, [_STAGES, 64, 128], tile)
    w_tile = gl.allocate_shared_memory(dtype, [1, 128, 64], tile)
    phi_tiles = gl.allocate_shared_memory(dtype, [2, 64, 64], tile)
    full = gl.allocate_shared_memory(gl.int64, [2 * _STAGES + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * _STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * _STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(full.index(_W), count=1)
    row = gl.program_id(0) // count
    segment = gl.program_id(0) % count
    b = row // kv_heads
    g = row % kv_heads
    first = segment * length
    last = gl.minimum(first + length, chunks)
    # The keys of the last two chunks have not left the window; those of a segment's last chunk are for the next.
    stop = gl.maximum(gl.minimum(last if SUMS else last - 1, chunks - 2), first)
    tensors = (S, z, sum_S, sum_z, first_S, first_z, end_S, end_z)
    tiles = (k_tiles, v_tiles, w_tile, phi_tiles)
    where = (row, chunks, first, stop, last, segment * parts, sums)
    gl.warp_specialize(
        [
            (_walk, (tensors, tiles, full, empty, where, SUMS, HAS_FIRST, HAS_END, 0)),
            (_walk, (tensors, tiles, full, empty, where, SUMS, HAS_FIRST, HAS_END, 1)),
            (_copy, (k, v, w, tiles, full, empty, b, g, first, stop)),
        ],
        [4, 1],
        [240, 24],
    )


SEGMENT_KERNEL = TileKernel(segment_kernel, ROW_BLOCK, ROW_BLOCK, (128, 64))
