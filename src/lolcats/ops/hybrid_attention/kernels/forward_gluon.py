"""Outputs on Hopper where four query heads share keys, values and states: all four read them from shared memory.

`direct_kernel` takes 64 queries of one head per program, so that four programs load the same keys, values and state.
Here one program walks consecutive chunks of one sequence and key/value head. One warp copies tiles into shared memory
ahead of two warpgroups of two heads each; a chunk's keys and values stay for the next chunk, whose windows hold them
too. Every tile of shared memory has two barriers: `full`, for those who read it, and `empty`, for the warp that copies.

Written in Gluon, Triton's language of explicit layouts, barriers and asynchronous products, with the division of work
of FlashAttention-3 (arXiv:2407.08608). Rounding is as in `direct_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lolcats.ops.hybrid_attention.kernels.launch import multiprocessors
from lolcats.ops.hybrid_attention.kernels.shape import LOG2_E, Operands, in_log2, rows
from lolcats.ops.hybrid_attention.params import DENOMINATOR_FLOOR

_LOG2_E = gl.constexpr(LOG2_E)
_FLOOR = gl.constexpr(DENOMINATOR_FLOOR)
# Barriers: queries of head 0 to 3, then weights, two chunks of keys, two of values, the state.
_W, _K, _V, _S = gl.constexpr(4), gl.constexpr(5), gl.constexpr(7), gl.constexpr(9)
_BARRIERS = gl.constexpr(10)
_TILE_BYTES = gl.constexpr(64 * 128 * 2)
# Tiles in shared memory; [64, 64] and [64, 128] as products leave them; [64, 128] for stores of whole sectors.
TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
NARROW = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
WIDE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 16], [0, 32], [0, 64], [8, 0]],
        lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
ROW_BLOCK = (1, 1, 64, 128)


class TileKernel:
    """A kernel that copies tiles of its first arguments by descriptors. They hold addresses: each launch makes its own.

    Args:
        blocks: sizes of the tiles, one for each of these arguments. A tensor is seen as a matrix of its rows where the
            tile is one.
    """

    def __init__(self, function: Any, *blocks: tuple[int, ...]) -> None:
        self.function, self.blocks, self.arg_names = function, blocks, function.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., _Compiled]:
        """What launches it, and returns what launches it again."""

        def run(*arguments: Any, **constants: Any) -> _Compiled:
            tiles = list(map(_descriptor, arguments, self.blocks))
            return _Compiled(self.function[grid](*tiles, *arguments[len(tiles) :], **constants), tiles)

        return run


class _Tile(NamedTuple):
    """What a compiled kernel's launch reads of a `TensorDescriptor`, whose checks take longer than the launch."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    padding: str = "zero"


class _Compiled:
    """Launches the kernel for tensors of the sizes and strides of the first launch's, which the plan's key holds."""

    def __init__(self, compiled: Any, tiles: list[TensorDescriptor]) -> None:
        self.compiled, self.layouts = compiled, [(tile.shape, tile.strides) for tile in tiles]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        run, layouts, count = self.compiled[grid], self.layouts, len(self.layouts)

        def launch(*arguments: Any, stream: Any) -> None:
            tiles = [_Tile(x, *layout) for x, layout in zip(arguments, layouts, strict=False)]
            run(*tiles, *arguments[count:], stream=stream)

        return launch


def _descriptor(x: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    shape, strides = list(x.shape), list(x.stride())
    if len(block) == 2:
        shape, strides = [x.numel() // shape[-1], shape[-1]], [shape[-1], 1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(block))
    return TensorDescriptor(x, shape, strides, list(block), layout)


def can_copy(x: Tensor) -> bool:
    """Whether a descriptor can tell where the rows of x [B, H, T, D] lie."""
    return x.data_ptr() % 16 == 0 and all(stride > 0 and stride % 8 == 0 for stride in x.stride()[:3])


def takes_heads(x: Operands) -> bool:
    """Whether the kernels that copy tiles know the heads, windows and layout of a call that `is_special`.

    Weights have the type of q where `Operands.with_small_weights` has made them so.
    """
    shape = x.shape
    is_known = shape.REPEATS == 4 and shape.SHARES == 1 and not (shape.SLIDING or shape.RAGGED or shape.HAS_LENGTH)
    return is_known and x.maps.k_weight.dtype == torch.bfloat16 and can_copy(x.k) and can_copy(x.v)


def is_shared(x: Operands) -> bool:
    """Whether `shared_kernel` takes this call, of those that `direct_kernel` takes."""
    return takes_heads(x) and x.scale > 0 and can_copy(x.q)


def shared_outputs(x: Operands, states: Any, y: Tensor) -> None:
    """Outputs of all queries into y, from the states before every chunk."""
    sequences = x.sizes.chunk_rows * x.sizes.kv_heads
    programs = min(sequences * x.sizes.chunks, multiprocessors(x.q.device))
    x.plan.launch(
        SHARED_KERNEL,
        (programs,),
        x.q,
        x.k,
        x.v,
        x.maps.q_weight,
        states.prefix_S,
        states.prefix_z,
        x.gamma,
        rows(y),
        *x.counts,
        sequences,
        in_log2(x.scale),
        num_warps=4,
    )


@gluon.jit
def half_features(u_MP, scale):
    """`half_features` of hedgehog times a number."""
    half = gl.exp2(u_MP * _LOG2_E - (gl.max(u_MP, 1) * _LOG2_E)[:, None])
    return half * (scale / gl.sum(half, 1))[:, None]


@gluon.jit
def copy_tile(x, at, tile, full, empty, free):
    """[64, 128] of a tensor [B, H, T, D], once the tile is empty; what lies outside of the tensor is zero."""
    mbarrier.wait(empty, free)
    mbarrier.expect(full, _TILE_BYTES)
    tma.async_copy_global_to_shared(x, at, full, tile.reshape([1, 1, 64, 128]))


@gluon.jit
def _copy(q, k, v, w, S, tiles, full, empty, chunk, end, chunks, kv_heads):
    """All that the program's chunks need, in the order in which tiles become empty."""
    q_tiles, k_tiles, v_tiles, S_tile, w_tiles = tiles
    step = 0
    entry = 0  # in the rings of keys and values
    run = 0
    while chunk < end:  # a run of chunks of one sequence and head
        row = chunk // chunks
        b = row // kv_heads
        g = row % kv_heads
        c = chunk % chunks
        stop = gl.minimum(chunks, c + end - chunk)
        chunk += stop - c
        mbarrier.wait(empty.index(_W), (run & 1) ^ 1)
        mbarrier.expect(full.index(_W), 4 * _TILE_BYTES)
        for i in gl.static_range(4):
            tma.async_copy_global_to_shared(w, [(g * 4 + i) * 128, 0], full.index(_W), w_tiles.index(i))
        run += 1
        slot = entry & 1
        free = ((entry >> 1) & 1) ^ 1
        before = (c - 1) * 64
        copy_tile(k, [b, g, before, 0], k_tiles.index(slot), full.index(_K + slot), empty.index(_K + slot), free)
        copy_tile(v, [b, g, before, 0], v_tiles.index(slot), full.index(_V + slot), empty.index(_V + slot), free)
        entry += 1
        while c < stop:
            slot = entry & 1
            free = ((entry >> 1) & 1) ^ 1
            step_free = (step & 1) ^ 1
            first = c * 64
            for i in gl.static_range(0, 4, 2):  # the first head of both warpgroups
                copy_tile(q, [b, g * 4 + i, first, 0], q_tiles.index(i), full.index(i), empty.index(i), step_free)
            copy_tile(k, [b, g, first, 0], k_tiles.index(slot), full.index(_K + slot), empty.index(_K + slot), free)
            for i in gl.static_range(1, 4, 2):
                copy_tile(q, [b, g * 4 + i, first, 0], q_tiles.index(i), full.index(i), empty.index(i), step_free)
            copy_tile(v, [b, g, first, 0], v_tiles.index(slot), full.index(_V + slot), empty.index(_V + slot), free)
            mbarrier.wait(empty.index(_S), step_free)
            mbarrier.expect(full.index(_S), 2 * _TILE_BYTES)
            at_state = (row * chunks + gl.maximum(c - 1, 0)) * 128
            tma.async_copy_global_to_shared(S, [at_state, 0], full.index(_S), S_tile.index(0))
            c += 1
            entry += 1
            step += 1


@gluon.jit
def _attend(z, gamma, y, tiles, full, empty, chunk, end, tokens, chunks, kv_heads, scale, HALF: gl.constexpr):
    """Outputs of two of the four heads, by one warpgroup."""
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=WIDE, k_width=2)
    dtype: gl.constexpr = gl.bfloat16
    q_tiles, k_tiles, v_tiles, S_tile, w_tiles = tiles
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, NARROW))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, NARROW))
    y_row = gl.arange(0, 64, layout=gl.SliceLayout(1, STORED))
    y_column = gl.arange(0, 128, layout=gl.SliceLayout(0, STORED))
    step = 0
    entry = 0
    run = 0
    while chunk < end:
        at = chunk // chunks
        b = at // kv_heads
        g = at % kv_heads
        c = chunk % chunks
        stop = gl.minimum(chunks, c + end - chunk)
        chunk += stop - c
        mbarrier.wait(full.index(_W), run & 1)
        run += 1
        mbarrier.wait(full.index(_K + (entry & 1)), (entry >> 1) & 1)
        mbarrier.wait(full.index(_V + (entry & 1)), (entry >> 1) & 1)
        entry += 1
        second = 0  # of the two heads
        while c < stop:
            head = 2 * HALF + second
            slot = entry & 1
            ready = (entry >> 1) & 1
            h = g * 4 + head
            factor = gl.load(gamma + h).to(gl.float32)
            rounded = factor.to(dtype).to(gl.float32)  # as weights are, see `direct_kernel`
            quotient = gl.where(rounded == 0.0, 1.0, rounded / factor)
            z_at = z + (at * chunks + gl.maximum(c - 1, 0)) * 128
            z_plus = gl.load(z_at + column)
            z_minus = gl.load(z_at + 64 + column)

            mbarrier.wait(full.index(_K + slot), ready)
            mbarrier.wait(full.index(head), step & 1)
            q_MD = q_tiles.index(head)
            zero = gl.zeros([64, 64], gl.float32, layout=NARROW)
            u = warpgroup_mma(q_MD, w_tiles.index(head), zero, use_acc=False, is_async=True)
            k_A = k_tiles.index(slot ^ 1).permute((1, 0))  # of the chunk before
            k_B = k_tiles.index(slot).permute((1, 0))
            score_A = warpgroup_mma(q_MD, k_A, zero, use_acc=False, is_async=True)
            score_B = warpgroup_mma(q_MD, k_B, zero, use_acc=False, is_async=True)
            u = warpgroup_mma_wait(2, deps=[u])
            plus = half_features(u, quotient)
            minus = half_features(-u, quotient)
            linear = gl.sum(plus * z_plus[None, :], 1) + gl.sum(minus * z_minus[None, :], 1)
            plus = gl.convert_layout(plus.to(dtype), left)
            minus = gl.convert_layout(minus.to(dtype), left)
            score_A, score_B = warpgroup_mma_wait(0, deps=[score_A, score_B])
            mbarrier.arrive(empty.index(head), count=1)
            if second == 1:
                mbarrier.arrive(empty.index(_K + (slot ^ 1)), count=1)
                if c + 1 == stop:
                    mbarrier.arrive(empty.index(_K + slot), count=1)

            score_B = gl.where(column[None, :] <= row[:, None], score_B, float("-inf"))
            top = gl.max(score_B, 1)
            is_first = c == 0  # there is no chunk before it
            top = gl.where(is_first, top, gl.maximum(top, gl.max(score_A, 1))) * scale
            exact_A = gl.exp2(score_A * scale - gl.where(is_first, float("inf"), top)[:, None])
            exact_B = gl.exp2(score_B * scale - top[:, None])
            total = (gl.sum(exact_A, 1) + gl.sum(exact_B, 1)) * rounded + linear
            weight_A = gl.convert_layout((exact_A * rounded).to(dtype), left)
            weight_B = gl.convert_layout((exact_B * rounded).to(dtype), left)
            inverse = gl.convert_layout(1.0 / gl.maximum(total, _FLOOR), gl.SliceLayout(1, WIDE))

            mbarrier.wait(full.index(_V + slot), ready)
            mbarrier.wait(full.index(_S), step & 1)
            S_FD = S_tile.index(0)
            acc = gl.zeros([64, 128], gl.float32, layout=WIDE)
            acc = warpgroup_mma(weight_A, v_tiles.index(slot ^ 1), acc, use_acc=False, is_async=True)
            acc = warpgroup_mma(weight_B, v_tiles.index(slot), acc, is_async=True)
            acc = warpgroup_mma(plus, S_FD.slice(0, 64, dim=0), acc, is_async=True)
            acc = warpgroup_mma(minus, S_FD.slice(64, 64, dim=0), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            token = c * 64 + y_row
            y_at = y.x + (b.to(gl.int64) * y.b + h.to(gl.int64) * y.h)
            y_at = y_at + token.to(gl.int64)[:, None] * y.t + y_column[None, :]
            if second == 1:
                mbarrier.arrive(empty.index(_V + (slot ^ 1)), count=1)
                mbarrier.arrive(empty.index(_S), count=1)
                c += 1
                if c == stop:
                    mbarrier.arrive(empty.index(_V + slot), count=1)
                entry += 1
                step += 1
            second ^= 1
            result = gl.convert_layout((acc * inverse[:, None]).to(dtype), STORED)
            gl.store(y_at, result, mask=(token < tokens)[:, None])
        mbarrier.arrive(empty.index(_W), count=1)


@gluon.jit(do_not_specialize=["tokens", "chunks", "kv_heads", "sequences"])
def shared_kernel(q, k, v, w, S, z, gamma, y, tokens, chunks, kv_heads, sequences, scale):
    """One program: as many chunks of 64 queries as every other, of all four heads of a key/value head.

    Args:
        sequences: times key/value heads.
        scale: of the scores, times log2(e); positive.
    """
    dtype: gl.constexpr = gl.bfloat16
    q_tiles = gl.allocate_shared_memory(dtype, [4, 64, 128], TILE)
    w_tiles = gl.allocate_shared_memory(dtype, [4, 128, 64], TILE)
    k_tiles = gl.allocate_shared_memory(dtype, [2, 64, 128], TILE)
    v_tiles = gl.allocate_shared_memory(dtype, [2, 64, 128], TILE)
    S_tile = gl.allocate_shared_memory(dtype, [1, 128, 128], TILE)
    full = gl.allocate_shared_memory(gl.int64, [_BARRIERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_BARRIERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1 if i < 4 else 2)  # both warpgroups read all but the queries
    work = sequences * chunks
    program = gl.program_id(0)
    first = program * work // gl.num_programs(0)
    end = (program + 1) * work // gl.num_programs(0)
    tiles = (q_tiles, k_tiles, v_tiles, S_tile, w_tiles)
    gl.warp_specialize(
        [
            (_attend, (z, gamma, y, tiles, full, empty, first, end, tokens, chunks, kv_heads, scale, 0)),
            (_attend, (z, gamma, y, tiles, full, empty, first, end, tokens, chunks, kv_heads, scale, 1)),
            (_copy, (q, k, v, w, S, tiles, full, empty, first, end, chunks, kv_heads)),
        ],
        [4, 1],
        [240, 24],
    )


SHARED_KERNEL = TileKernel(shared_kernel, ROW_BLOCK, ROW_BLOCK, ROW_BLOCK, (128, 64), (128, 128))
