"""What the Triton kernels of the hybrid attention share: windows, tiles, feature maps, their gradients.

Only `support` may be imported without Triton.

Shape suffixes in kernels: M rows of a query tile, N keys of a key tile, P columns of a projection padded to
a power of two, D head_dim padded to a power of two. A feature map with two signs is kept as two halves [., P];
they are joined only in memory, where states are [F, D] with F = P or 2 P.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.ops.hybrid_attention.spec import DENOMINATOR_FLOOR
from lolcats.ops.hybrid_attention.spec import HybridSpec

# Tokens between two stored states; a multiple of every key tile.
STATE_CHUNK = 64
LOG2_E = 1.4426950408889634
# Rows of q, k, v beyond this take the configurations with smaller tiles: head_dim 256, or 128 in float32.
WIDE_ROW_BYTES = 256
# From this many tiles of 64 queries on, throughput counts and not latency: eight for each multiprocessor.
CROWDED_TILES = 1024
# Integer arguments that change from call to call: kernels are compiled once for all their values.
SIZES = ("tokens", "chunks", "sinks_there", "splits", "tiles")
# Triton's interpreter runs kernels on the CPU (TRITON_INTERPRET=1).
INTERPRETED = bool(triton.knobs.runtime.interpret)
AUTOTUNE = not INTERPRETED and os.environ.get("LOLCATS_AUTOTUNE", "1") != "0"
# Without autotuning: which configuration of every list to take, modulo its length.
LAUNCH_CONFIG = int(os.environ.get("LOLCATS_LAUNCH_CONFIG", "0"))

_INTERPRETED = tl.constexpr(INTERPRETED)
_FLOOR = tl.constexpr(DENOMINATOR_FLOOR)


@dataclass(frozen=True)
class Operands:
    """Tensors and sizes of one call, as the kernels take them.

    Rows are sequences on a grid that starts at token 0: entry t of row b is real iff t < length[b], and its
    position in the sequence is base[b] + t. Both are int32 [B] or None (all real; zero).
    Or rows hold any sequences, `table` and `slots` are those of `segments.Segments`, length is None, and where
    this text says "sequence b", the segment is meant.

    The first `sequences` sequences have an initial state (if S is given) and a final state.

    q [B, H, T, D]; k, v [B, G, T, D]; the last dimension of each is contiguous. Weights and biases as in
    `HybridParams`, contiguous. S [sequences, S, F, D] and z [sequences, S, F] are float32 sums of the keys before
    the grid, or None. sink_k, sink_v [B, G, <= sinks, D] or None, B: sequences or more.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gamma: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    q_bias: Tensor | None
    k_bias: Tensor | None
    S: Tensor | None
    z: Tensor | None
    sink_k: Tensor | None
    sink_v: Tensor | None
    length: Tensor | None
    base: Tensor | None
    table: Tensor | None
    slots: Tensor | None
    sequences: int
    spec: HybridSpec
    scale: float

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def segments(self) -> int:
        """Number of segments; without a table the rows are the segments."""
        return self.batch if self.table is None else self.table.shape[0] - 1

    @property
    def tokens(self) -> int:
        return self.q.shape[2]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def state_heads(self) -> int:
        return 1 if self.k_weight is None else self.k_weight.shape[0]

    @property
    def columns(self) -> int:
        return 1 if self.k_weight is None else self.k_weight.shape[2]

    @property
    def features(self) -> int:
        return 0 if self.spec.feature_map is None else self.columns * get_feature_map(self.spec.feature_map).multiple

    @property
    def chunk_rows(self) -> int:
        """How many lists of chunks there are: one per row, or one for all rows of a ragged batch."""
        return self.batch if self.slots is None else 1

    @property
    def chunks(self) -> int:
        """Length of a list of chunks."""
        return triton.cdiv(self.tokens, STATE_CHUNK) if self.slots is None else self.slots.shape[0]

    @property
    def state_dtype(self) -> torch.dtype:
        """Type of the states between chunks: the range of float16 is too small for sums over a sequence."""
        return torch.bfloat16 if self.q.dtype == torch.float16 else self.q.dtype

    @property
    def crowded(self) -> bool:
        return self.chunk_rows * self.heads * self.chunks >= CROWDED_TILES

    @property
    def sliding(self) -> bool:
        """Whether windows start at every token; without a window all tokens up to the query are linear."""
        return self.spec.window == "sliding" or self.spec.window_size == 0

    @property
    def inner(self) -> bool:
        """Whether a query has linear keys between the state that its tile starts from and its window."""
        return self.sliding or self.spec.window_size % STATE_CHUNK != 0

    @property
    def projection_block(self) -> int:
        """Columns of a tile of projections.

        ptxas 12.8, which Triton 3.6 compiles for Hopper with, leaves the address of a tile of fewer than 64
        half-precision columns unset in kernels that multiply by such a tile after the loop over the window: products
        with the feature maps' weights then read outside of shared memory, or give wrong sums. In its machine code
        this happened with sinks, with or without inner keys; both take 64 columns. ptxas 12.9 has no such fault.
        """
        columns = padded(self.columns)
        if (self.inner or self.spec.sinks > 0) and self.q.dtype != torch.float32 and not INTERPRETED:
            return max(columns, min(padded(self.head_dim), 64))
        return columns

    def with_small_weights(self) -> Operands:
        """Weights in the type of q where so many tiles read them that a copy pays."""
        if not self.crowded or self.q_weight is None or self.k_weight is None:
            return self
        return replace(self, q_weight=self.q_weight.to(self.q.dtype), k_weight=self.k_weight.to(self.q.dtype))

    @property
    def window_columns(self) -> int:
        """Keys in the chunks that the windows of any STATE_CHUNK queries, one tile, can meet."""
        spec = self.spec
        if spec.window_size == 0:
            return 0
        reach = spec.window_size - 1  # how far before the tile its first window can start
        if spec.window == "terraced":
            reach = spec.blocks * spec.window_size - math.gcd(spec.window_size, STATE_CHUNK)
        return (1 + triton.cdiv(reach, STATE_CHUNK)) * STATE_CHUNK

    @property
    def sink_columns(self) -> int:
        return padded(self.spec.sinks) if self.spec.sinks > 0 else 0

    @property
    def layout(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """length, base, table and slots, as kernels take them."""
        q = self.q
        return or_dummy(self.length, q), or_dummy(self.base, q), or_dummy(self.table, q), or_dummy(self.slots, q)

    def constants(self, kernel: Tuned) -> dict[str, Any]:
        """Those of the compile-time constants that the kernel takes."""
        spec = self.spec
        constants = {
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "STATE_HEADS": self.state_heads,
            "D": self.head_dim,
            "P": self.columns,
            "F": self.features,
            "MAP": spec.feature_map or "none",
            "SLIDING": self.sliding,
            "INNER": self.inner,
            "W": spec.window_size,
            "BLOCKS": spec.blocks,
            "SINKS": spec.sinks,
            "HAS_BIAS": self.q_bias is not None,
            "HAS_INITIAL": self.S is not None,
            "HAS_LENGTH": self.length is not None,
            "HAS_BASE": self.base is not None,
            "RAGGED": self.table is not None,
            "CROWDED": self.crowded,
            "C": STATE_CHUNK,
            "DB": padded(self.head_dim),
            "PB": self.projection_block,
            "SB": self.sink_columns,
            "WINDOW": self.window_columns,
        }
        return {name: value for name, value in constants.items() if name in kernel.kernel.arg_names}


def padded(size: int) -> int:
    """Next power of two that a tile may have; tensor cores take at least 16."""
    return max(triton.next_power_of_2(size), 16)


def strides(tensor: Tensor | None) -> tuple[int, int, int]:
    """Batch, head and token strides of [B, H, T, D]."""
    if tensor is None:
        return 0, 0, 0
    batch, head, token, _ = tensor.stride()
    return batch, head, token


def or_dummy(tensor: Tensor | None, like: Tensor) -> Tensor:
    """A pointer that is never read in place of a missing tensor."""
    return like if tensor is None else tensor


class Tuned:
    """A kernel with two lists of launch configurations: for tiles of usual width, and for wide ones.

    A config maps block sizes, "warps", "stages" and, if given, "registers" (most per thread) to numbers.
    Autotuning tries the few of a list once per key and keeps the result on disk. The interpreter, and every
    process with LOLCATS_AUTOTUNE=0 (tests: fewer kernels to compile), takes one: LOLCATS_LAUNCH_CONFIG, 0 by default.

    Kernels whose products feed each other take 4 warps. Triton 3.6 lays such products out for Hopper with all
    warps along the rows, 16 each, however few rows there are. With 8 warps on 64 rows, and the same sum laid
    out otherwise in a loop, kernels crashed or had wrong sums on an H200.
    """

    # Constants that change what a kernel does or how much of it there is. A call has few values of each.
    key = (
        "D", "P", "MAP", "SLIDING", "W", "BLOCKS", "SINKS", "CROWDED", "SAVE", "ERROR", "NEED_INPUTS", "KEYS",
    )  # fmt: skip

    def __init__(self, kernel: Any, configs: Sequence[dict[str, int]], wide: Sequence[dict[str, int]]) -> None:
        self.kernel = kernel
        self.narrow, self.wide = self.autotuned(configs), self.autotuned(wide)

    def autotuned(self, configs: Sequence[dict[str, int]]) -> Any:
        """The kernel with one list of configurations."""
        choices = [
            triton.Config(
                {name: value for name, value in config.items() if name.isupper()},
                num_warps=config["warps"],
                num_stages=config["stages"],
                maxnreg=config.get("registers"),
            )
            for config in configs
        ]
        if not AUTOTUNE:
            choices = [choices[LAUNCH_CONFIG % len(choices)]]
        key = [name for name in self.key if name in self.kernel.arg_names]
        return triton.autotune(configs=choices, key=key, cache_results=True)(self.kernel)

    def __call__(self, head_dim: int, dtype: torch.dtype) -> Any:
        """The kernel for these tiles, to be launched as `tuned(head_dim, dtype)[grid](...)`."""
        return self.wide if padded(head_dim) * dtype.itemsize > WIDE_ROW_BYTES else self.narrow


def tuned(configs: Sequence[dict[str, int]], wide: Sequence[dict[str, int]]) -> Callable[[Any], Tuned]:
    """Decorator for a plain function: compile it, and choose its configuration as `Tuned` says."""

    def decorate(function: Callable) -> Tuned:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        kernel = triton.jit(function, do_not_specialize=[name for name in SIZES if name in names])
        return Tuned(kernel, configs, wide)

    return decorate


@triton.jit
def dot(a, b, acc=None):
    """a @ b (+ acc) with float32 sums.

    float32 factors are split in two tf32 numbers each, which leaves an error of about 2^-21. Products of whole
    float32 numbers ("ieee") would run outside the matrix units, and spill registers at these tile sizes.
    """
    if _INTERPRETED:  # the interpreter multiplies the bit patterns of bfloat16; the products are exact in float32
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def window_start(entry, SLIDING: tl.constexpr, W: tl.constexpr, BLOCKS: tl.constexpr):
    """First key in the window of the query at `entry`; all keys before it are linear."""
    start = entry - (W - 1) if SLIDING else (entry // W - (BLOCKS - 1)) * W
    return tl.maximum(start, 0)


@triton.jit
def sequence(n, length, table, tokens, HAS_LENGTH: tl.constexpr, RAGGED: tl.constexpr):
    """Where sequence n lies: row of the batch, first token, tokens with padding, tokens, first chunk."""
    if RAGGED:
        entry = table + n * 5
        row = tl.load(entry).to(tl.int64)
        first_token = tl.load(entry + 1).to(tl.int64)
        return row, first_token, tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    else:
        limit = tokens
        if HAS_LENGTH:
            limit = tl.minimum(tl.load(length + n), tokens)
        return n, n * 0, tokens, limit, tokens * 0


@triton.jit
def locate(list_row, slot, length, table, slots, tokens, HAS_LENGTH: tl.constexpr, RAGGED: tl.constexpr):
    """The sequence of chunk `slot` in list `list_row` of chunks: its number, and what `sequence` returns."""
    n = tl.load(slots + slot).to(tl.int64) if RAGGED else list_row
    row, first_token, cells, limit, first_chunk = sequence(n, length, table, tokens, HAS_LENGTH, RAGGED)
    return n, row, first_token, cells, limit, first_chunk


@triton.jit
def load_rows(pointer, first, stride, limit, column, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Tile [ROWS, COLUMNS] from row `first` and column `column`; zero from row `limit` and column D on."""
    row = tl.arange(0, ROWS)
    col = column + tl.arange(0, COLUMNS)
    address = pointer + tl.cast(first, tl.int64) * stride + row[:, None] * stride + col[None, :]
    mask = (first + row < limit)[:, None]
    if D % COLUMNS != 0:
        mask = mask & (col < D)[None, :]
    return tl.load(address, mask=mask, other=0.0)


@triton.jit
def store_rows(pointer, tile, first, stride, limit, column, D: tl.constexpr):
    """The inverse of `load_rows`; rows from `limit` on are left alone."""
    row = tl.arange(0, tile.shape[0])
    col = column + tl.arange(0, tile.shape[1])
    address = pointer + tl.cast(first, tl.int64) * stride + row[:, None] * stride + col[None, :]
    mask = (first + row < limit)[:, None] & (col < D)[None, :]
    tl.store(address, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_matrix(pointer, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr):
    """Tile [RB, CB] from column `column` of a contiguous [ROWS, COLUMNS] matrix, padded with zeros."""
    row = tl.arange(0, RB)
    col = column + tl.arange(0, CB)
    address = pointer + row[:, None] * COLUMNS + col[None, :]
    if (ROWS == RB) and (COLUMNS % CB == 0):
        return tl.load(address)
    return tl.load(address, mask=(row < ROWS)[:, None] & (col < COLUMNS)[None, :], other=0.0)


@triton.jit
def store_matrix(pointer, tile, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Tile into a contiguous [ROWS, COLUMNS] matrix, without the padding."""
    row = tl.arange(0, tile.shape[0])
    col = column + tl.arange(0, tile.shape[1])
    address = pointer + row[:, None] * COLUMNS + col[None, :]
    mask = (row < ROWS)[:, None] & (col < COLUMNS)[None, :]
    tl.store(address, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_vector(pointer, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    return tl.load(pointer + index, mask=index < SIZE, other=0.0)


@triton.jit
def store_vector(pointer, x, SIZE: tl.constexpr):
    index = tl.arange(0, x.shape[0])
    tl.store(pointer + index, x, mask=index < SIZE)


@triton.jit
def project(x_MD, weight_DP, bias, head, P: tl.constexpr, PB: tl.constexpr, HAS_BIAS: tl.constexpr):
    """x W + b in float32: [M, P]."""
    projected_MP = dot(x_MD, weight_DP)
    if HAS_BIAS:
        projected_MP += load_vector(bias + head * P, P, PB).to(tl.float32)[None, :]
    return projected_MP


@triton.jit
def half_features(u_MP, MAP: tl.constexpr, P: tl.constexpr):
    """One half of the features in float32, zero in the padding: the first of u = x, the second of u = -x."""
    real = (tl.arange(0, u_MP.shape[1]) < P)[None, :]
    if (MAP == "hedgehog") or (MAP == "exp"):
        if u_MP.shape[1] > P:
            u_MP = tl.where(real, u_MP, float("-inf"))
        half = tl.exp(u_MP - tl.max(u_MP, 1)[:, None])
        if MAP == "hedgehog":
            half = half * (1.0 / tl.sum(half, 1))[:, None]
        return half
    elif MAP == "elu":
        half = tl.where(u_MP > 0, u_MP + 1.0, tl.exp(tl.minimum(u_MP, 0.0)))
        return tl.where(real, half, 0.0)
    else:
        return tl.maximum(u_MP, 0.0)  # t2r; the padding is zero already


@triton.jit
def features(x_MP, MAP: tl.constexpr, P: tl.constexpr):
    """Both halves of the features; maps without a second half repeat the first."""
    plus = half_features(x_MP, MAP, P)
    if (MAP == "hedgehog") or (MAP == "exp"):
        return plus, half_features(-x_MP, MAP, P)
    return plus, plus


@triton.jit
def half_gradient(u_MP, half, d_half, MAP: tl.constexpr, P: tl.constexpr):
    """Gradient of u [M, P] from that of its half of the features."""
    if MAP == "hedgehog":
        return half * (d_half - tl.sum(half * d_half, 1)[:, None])
    elif MAP == "exp":
        # exp(u - max u): the subgradient at the maximum (ties share it) takes the whole inner product
        is_top = ((half == 1.0) & (tl.arange(0, u_MP.shape[1]) < P)[None, :]).to(tl.float32)
        share = tl.sum(half * d_half, 1) / tl.maximum(tl.sum(is_top, 1), 1.0)  # masked rows have none
        return half * d_half - is_top * share[:, None]
    elif MAP == "elu":
        return tl.where(u_MP > 0, d_half, d_half * half)
    else:
        return tl.where(u_MP > 0, d_half, 0.0)
