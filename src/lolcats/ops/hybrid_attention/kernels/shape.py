"""What a call gives to the kernels, and how they are launched: tensors with their strides, the numbers that a kernel
is compiled for, launch configurations.

Kernels take named tuples: `Rows` is a tensor with its strides, `Layout` and `FeatureMaps` are tensors that go together,
`KernelShape` all numbers that are known when a kernel is compiled. Tensors that a call lacks are None, and what
would read them is not compiled.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map

# Tokens between two stored states; a multiple of every key tile.
STATE_CHUNK = 64
LOG2_E = 1.4426950408889634
# Triton's interpreter runs kernels on the CPU (TRITON_INTERPRET=1).
INTERPRETED = bool(triton.knobs.runtime.interpret)
# From this many tiles of 64 queries on, throughput counts and not latency: eight for each multiprocessor.
CROWDED_TILES = 1024
# Rows of q, k, v beyond this take the configurations with smaller tiles: head_dim 256, or 128 in float32.
WIDE_ROW_BYTES = 256

AUTOTUNE = not INTERPRETED and os.environ.get("LOLCATS_AUTOTUNE", "1") != "0"
# Without autotuning: which configuration of every list to take, modulo its length.
LAUNCH_CONFIG = int(os.environ.get("LOLCATS_LAUNCH_CONFIG", "0"))
# Integer arguments that change from call to call: kernels are compiled once for all their values.
SIZES = ("tokens", "chunks", "heads", "kv_heads", "sinks_there", "splits", "tiles")
# What of a call decides which configuration is best, besides the types of its tensors.
TUNING_KEY = ("shape", "SAVE", "ERROR", "NEED_INPUTS", "KEYS")


class Rows(NamedTuple):
    """A tensor [B, H, T, D] whose rows of D are contiguous: where it begins, and its strides. All may be None."""

    x: Any
    b: Any
    h: Any
    t: Any


class Layout(NamedTuple):
    """Where the sequences lie: int32 tensors or None, see `Operands`."""

    length: Any
    base: Any
    table: Any
    slots: Any


class FeatureMaps(NamedTuple):
    """Weights [heads, D, P] and biases [heads, P] of the feature maps, contiguous, or None."""

    q_weight: Any
    q_bias: Any
    k_weight: Any
    k_bias: Any


class KernelShape(NamedTuple):
    """What a kernel is compiled for: the settings of the attention and the sizes of its tensors. Layers that differ in
    their number of key/value heads, as where some are exact, share it."""

    REPEATS: int  # query heads of one key/value head
    SHARES: int  # states of one key/value head
    D: int  # head_dim
    P: int  # columns of the feature maps' projection
    F: int  # features, HALVES * P; 0 without a linear part
    HALVES: int  # 2 where the map takes features of x and of -x
    MAP: str  # the feature map's name, or "none"
    SLIDING: bool  # windows start at every token; without a window all tokens up to the query are linear
    INNER: bool  # queries have linear keys between the state that their tile starts from and their window
    W: int  # window size
    BLOCKS: int  # of the terraced window
    SINKS: int
    HAS_INITIAL: bool  # sequences start from a state
    HAS_LENGTH: bool
    HAS_BASE: bool
    RAGGED: bool  # sequences lie anywhere, as a table says
    CROWDED: bool
    WIDE: bool
    DTYPE: str  # of q, k and v
    C: int  # STATE_CHUNK
    DB: int  # D of a tile, a power of two
    PB: int  # P of a tile, a power of two
    SB: int  # sinks of a tile; 0 without sinks
    WINDOW: int  # keys in the chunks that the windows of any C queries, one tile, can meet

    @staticmethod
    @cache
    def of(
        config: AttentionConfig,
        dtype: torch.dtype,
        heads: int,
        kv_heads: int,
        state_heads: int,
        head_dim: int,
        columns: int,
        *,
        has_initial: bool = False,
        has_length: bool = False,
        has_base: bool = False,
        ragged: bool = False,
        crowded: bool = False,
    ) -> KernelShape:
        """The shape of a call; made once for each combination of arguments. `columns`: 1 without a linear part."""
        halves = 1 if config.feature_map is None else get_feature_map(config.feature_map).multiple
        sliding = config.window == "sliding" or config.window_size == 0
        inner = sliding or config.window_size % STATE_CHUNK != 0
        return KernelShape(
            REPEATS=heads // kv_heads,
            SHARES=state_heads // kv_heads,
            D=head_dim,
            P=columns,
            F=0 if config.feature_map is None else halves * columns,
            HALVES=halves,
            MAP=config.feature_map or "none",
            SLIDING=sliding,
            INNER=inner,
            W=config.window_size,
            BLOCKS=config.window_blocks,
            SINKS=config.sinks,
            HAS_INITIAL=has_initial,
            HAS_LENGTH=has_length,
            HAS_BASE=has_base,
            RAGGED=ragged,
            CROWDED=crowded,
            WIDE=padded(head_dim) * dtype.itemsize > WIDE_ROW_BYTES,
            DTYPE=str(dtype),
            C=STATE_CHUNK,
            DB=padded(head_dim),
            PB=_projection_block(columns, head_dim, dtype, wide=inner or config.sinks > 0),
            SB=padded(config.sinks) if config.sinks > 0 else 0,
            WINDOW=_window_columns(config),
        )


def padded(size: int) -> int:
    """Next power of two that a tile may have; tensor cores take at least 16."""
    return max(triton.next_power_of_2(size), 16)


def _projection_block(columns: int, head_dim: int, dtype: torch.dtype, *, wide: bool) -> int:
    """Columns of a tile of projections.

    ptxas 12.8, which Triton 3.6 compiles for Hopper with, leaves the address of a tile of fewer than 64
    half-precision columns unset in kernels that multiply by such a tile after the loop over the window: products
    with the feature maps' weights then read outside of shared memory, or give wrong sums. In its machine code
    this happened with sinks, with or without inner keys; both take 64 columns. ptxas 12.9 has no such fault.
    """
    if wide and dtype != torch.float32 and not INTERPRETED:
        return max(padded(columns), min(padded(head_dim), 64))
    return padded(columns)


def _window_columns(config: AttentionConfig) -> int:
    if config.window_size == 0:
        return 0
    reach = config.window_size - 1  # how far before the tile its first window can start
    if config.window == "terraced":
        reach = config.window_blocks * config.window_size - math.gcd(config.window_size, STATE_CHUNK)
    return (1 + triton.cdiv(reach, STATE_CHUNK)) * STATE_CHUNK


@dataclass(frozen=True)
class Operands:
    """Tensors and sizes of one call, as the operators take them.

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
    config: AttentionConfig
    scale: float

    @cached_property
    def shape(self) -> KernelShape:
        _, heads, _, head_dim = self.q.shape
        return KernelShape.of(
            self.config,
            self.q.dtype,
            heads,
            self.kv_heads,
            self.kv_heads if self.k_weight is None else self.k_weight.shape[0],
            head_dim,
            1 if self.k_weight is None else self.k_weight.shape[2],
            has_initial=self.S is not None,
            has_length=self.length is not None,
            has_base=self.base is not None,
            ragged=self.table is not None,
            crowded=self.chunk_rows * heads * self.chunks >= CROWDED_TILES,
        )

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def is_linear(self) -> bool:
        """Whether there is a linear part."""
        return self.config.feature_map is not None

    @property
    def segments(self) -> int:
        """Number of segments; without a table the rows are the segments."""
        return self.q.shape[0] if self.table is None else self.table.shape[0] - 1

    @property
    def tokens(self) -> int:
        return self.q.shape[2]

    @property
    def chunk_rows(self) -> int:
        """How many lists of chunks there are: one per row, or one for all rows of a ragged batch."""
        return self.q.shape[0] if self.slots is None else 1

    @property
    def chunks(self) -> int:
        """Length of a list of chunks."""
        return triton.cdiv(self.tokens, STATE_CHUNK) if self.slots is None else self.slots.shape[0]

    @property
    def sinks_there(self) -> int:
        return 0 if self.sink_k is None else self.sink_k.shape[2]

    @property
    def layout(self) -> Layout:
        return Layout(self.length, self.base, self.table, self.slots)

    @property
    def maps(self) -> FeatureMaps:
        return FeatureMaps(self.q_weight, self.q_bias, self.k_weight, self.k_bias)

    def with_small_weights(self) -> Operands:
        """Weights in the type of q where so many tiles read them that a copy pays."""
        if not self.shape.CROWDED or self.q_weight is None or self.k_weight is None:
            return self
        return replace(self, q_weight=self.q_weight.to(self.q.dtype), k_weight=self.k_weight.to(self.q.dtype))

    def empty_states(self) -> tuple[Tensor, Tensor]:
        """Memory for a state per chunk: S [B, S, N, F, D] and z [B, S, N, F].

        S has the type of q; the range of float16 is too small for sums over a sequence. In float32 it would cost more
        traffic than q, k, v and y together.
        """
        dtype = torch.bfloat16 if self.q.dtype == torch.float16 else self.q.dtype
        assert self.k_weight is not None
        state_heads, _, columns = self.k_weight.shape
        features = columns * get_feature_map(str(self.config.feature_map)).multiple
        shape = (self.chunk_rows, state_heads, self.chunks, features)
        S = torch.empty(*shape, self.q.shape[3], device=self.q.device, dtype=dtype)
        return S, torch.empty(shape, device=self.q.device, dtype=torch.float32)

    def empty_rows(self, *more: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for something of every query: [B, H, T, *more]."""
        return torch.empty(*self.q.shape[:3], *more, device=self.q.device, dtype=dtype)


def rows(x: Tensor | None) -> Rows:
    """A tensor [B, H, T, D] as kernels take it."""
    return Rows(None, None, None, None) if x is None else Rows(x, *x.stride()[:3])


class Tuned:
    """A kernel with two lists of launch configurations: for tiles of usual width, and for wide ones.

    A config maps block sizes, "warps", "stages" and, if given, "registers" (most per thread) to numbers.
    Autotuning tries the few of a list once per key and keeps the result on disk. The interpreter, and every
    process with LOLCATS_AUTOTUNE=0 (tests: fewer kernels to compile), takes one: LOLCATS_LAUNCH_CONFIG, 0 by default.

    Kernels whose products feed each other take 4 warps. Triton 3.6 lays such products out for Hopper with all
    warps along the rows, 16 each, however few rows there are. With 8 warps on 64 rows, and the same sum laid
    out otherwise in a loop, kernels crashed or had wrong sums on an H200.
    """

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
        key = [name for name in TUNING_KEY if name in self.kernel.arg_names]
        return triton.autotune(configs=choices, key=key, cache_results=True)(self.kernel)

    def __call__(self, shape: KernelShape) -> Any:
        """The kernel for these tiles, to be launched as `tuned(shape)[grid](...)`."""
        return self.wide if shape.WIDE else self.narrow


def tuned(configs: Sequence[dict[str, int]], wide: Sequence[dict[str, int]]) -> Callable[[Any], Tuned]:
    """Decorator for a plain function: compile it, and choose its configuration as `Tuned` says."""

    def decorate(function: Callable) -> Tuned:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        kernel = triton.jit(function, do_not_specialize=[name for name in SIZES if name in names])
        return Tuned(kernel, configs, wide)

    return decorate
