"""What a call gives to the kernels: tensors with their strides, and the numbers that a kernel is compiled for.

Kernels take named tuples: `Rows` is a tensor with its strides, `Layout` and `FeatureMaps` are tensors that go together,
`KernelShape` all numbers that are known when a kernel is compiled. Tensors that a call lacks are None, and what
would read them is not compiled.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.feature_maps import FEATURE_MAPS

# Kernels whose products feed each other take 4 warps: Triton 3.6 lays such products out for Hopper with all warps along
# the rows, 16 each, however few rows there are; with 8 warps on 64 rows kernels crashed or had wrong sums. Gradients of
# narrow keys take 8: before their loop both groups of 4 compute the same 64 rows; in it no product feeds another.

# Triton's interpreter runs kernels on the CPU (TRITON_INTERPRET=1).
INTERPRETED = bool(triton.knobs.runtime.interpret)
# Integer arguments that change from call to call: kernels are compiled once for all their values.
_SIZES = "tokens chunks heads kv_heads sinks_there batch sequences rows splits tiles slots folding"
SIZES = tuple(_SIZES.split())
# Tokens between two stored states; a multiple of every key tile.
STATE_CHUNK = 64
LOG2_E = 1.4426950408889634
# Rows of q, k, v beyond this take the configurations with smaller tiles: head_dim 256, or 128 in float32.
WIDE_ROW_BYTES = 256


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. `triton.cdiv` is for kernels: called on the host it takes longer than a launch."""
    return -(-a // b)


def next_power_of_2(size: int) -> int:
    """The least power of two that is not less than `size`, which is positive."""
    return 1 << (size - 1).bit_length()


def padded(size: int) -> int:
    """Next power of two that a tile may have; tensor cores take at least 16."""
    return max(next_power_of_2(size), 16)


def is_wide(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether rows take the configurations with smaller tiles."""
    return padded(head_dim) * dtype.itemsize > WIDE_ROW_BYTES


def in_log2(x: float | None) -> float | None:
    """A factor or cap of scores, or None, for kernels that take scores in units of log 2."""
    return None if x is None else x * LOG2_E


def launch(kernel: Any, grid: tuple[int], *args: Any, **constants: Any) -> Any:
    """`kernel[grid](*args, **constants)`, on AMD's GPUs without a bound of registers, which Triton refuses there."""
    if torch.version.hip is not None:
        constants.pop("maxnreg", None)
    return kernel[grid](*args, **constants)


class Rows(NamedTuple):
    """A tensor [B, H, T, D] whose rows of D are contiguous: where it begins, and its strides. All may be None."""

    x: Any
    b: Any
    h: Any
    t: Any


NO_ROWS = Rows(None, None, None, None)


def rows(x: Tensor | None) -> Rows:
    """A tensor [B, H, T, D] as kernels take it."""
    return NO_ROWS if x is None else Rows(x, *x.stride()[:3])


def token_rows(x: Tensor) -> Rows:
    """A tensor [T, H, D] as one of [1, H, T, D]."""
    return Rows(x, 0, x.stride(1), x.stride(0))


class Launches:
    """`launch` for calls with one key that agree in types, alignment, strides and which tensors there are.

    Triton looks at all arguments of a launch, to find what is compiled for them, which takes the host twice as long as
    the launch: here only at the first of each key.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, kernel: Any, grid: tuple[int], *args: Any, **constants: Any) -> None:
        key = key, id(kernel), *constants.values()
        if key in self.known:
            compiled, rest = self.known[key]
            compiled[grid[0], 1, 1](*args, *rest)
        elif compiled := launch(kernel, grid, *args, **constants):  # None by the interpreter
            self.known[key] = compiled, [constants[name] for name in kernel.arg_names if name in constants]


def alike(*tensors: Tensor) -> tuple[Any, ...]:
    """A key of `Launches`, of tensors that a layer does not keep."""
    return tuple((x.dtype, x.data_ptr() % 16, *x.stride()) for x in tensors)


class Layout(NamedTuple):
    """Where the sequences lie: int32 tensors or None, see `Operands`; and queries and outputs, if not as keys do.

    queries: [M, 2], the token of each sequence's first entry, and its first entry that has a query; padding has none.
    heads: int64, the key/value head of queries that each of keys belongs to; None: 0, 1, ...
    """

    base: Any
    table: Any
    slots: Any
    queries: Any = None
    heads: Any = None


class Sums(NamedTuple):
    """Rows of S [places, G, S / G, F, D] and z [places, G, S / G, F], float32, dense but for the first two axes: sums
    of keys, those before the grid, then all.

    page_2N: a pair of [N], where those of each sequence are read and written.
    seen_N: tokens before the grid; at 0 what the page holds is not used.
    """

    S: Any
    z: Any
    page_2N: Any
    seen_N: Any


class FeatureMaps(NamedTuple):
    """Weights [heads, D, P] and biases [heads, P] of the feature maps, contiguous, or None."""

    q_weight: Any
    k_weight: Any
    q_bias: Any
    k_bias: Any


class Inputs(NamedTuple):
    """The tensors of a call, see `Operands`, as kernels take them."""

    q: Rows
    k: Rows
    v: Rows
    window_factor: Any
    maps: FeatureMaps
    sink_logits: Any
    sink_k: Rows
    sink_v: Rows
    layout: Layout


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
    ) -> KernelShape:
        """The shape of a call; made once for each combination of arguments. `columns`: 1 without a linear part."""
        halves = 1 if config.feature_map is None else FEATURE_MAPS[config.feature_map].multiple
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
            C=STATE_CHUNK,
            DB=_half_precision_block(head_dim, 64, dtype),
            PB=_half_precision_block(columns, min(padded(head_dim), 64) if inner or config.sinks > 0 else 0, dtype),
            SB=padded(config.sinks) if config.sinks > 0 else 0,
            WINDOW=_window_columns(config),
        )


def _half_precision_block(columns: int, least: int, dtype: torch.dtype) -> int:
    """Columns of a tile of projections, keys or values: `least` or more where they are in half precision.

    ptxas 12.8, which Triton 3.6 compiles for Hopper with, leaves addresses of tiles of fewer than 64 half-precision
    columns unset in kernels that multiply by such a tile after the loop over the window: products then read outside of
    shared memory, or others' rows. In its machine code this happened to feature maps' weights, with sinks or inner
    keys, and to 32 columns of states of 256 features. ptxas 12.9 has no such fault.
    """
    if dtype != torch.float32 and not INTERPRETED:
        return max(padded(columns), least)
    return padded(columns)


def _window_columns(config: AttentionConfig) -> int:
    if config.window_size == 0:
        return 0
    reach = config.window_size - 1  # how far before the tile its first window can start
    if config.window == "terraced":
        reach = config.window_blocks * config.window_size - math.gcd(config.window_size, STATE_CHUNK)
    return (1 + cdiv(reach, STATE_CHUNK)) * STATE_CHUNK


class Operands:
    """Tensors and settings of one call.

    `tensors` are all that may have gradients, and `table` and `slots`, where these are all of a layout; sinks of rows
    are not among them.

    Every row is a sequence, from its first token. Or one row holds all sequences: `table` and `slots` are those of
    `Segments`, and where this text says "sequence b", segment b is meant. Sequences that resume from states
    are on a grid: entry t has position base[b] + t, int32 [sequences]; None: zero.

    The first sequences have an initial and a final state, if there are `sums`. `launch` launches the forward pass.

    q [B, H, T, D]; k, v [B, G, T, D]; the last dimension of each is contiguous. Weights and biases as in
    `HybridParams`, contiguous; sink_logits [H] or None, as without a softmax part. sink_k, sink_v [B, G, <= sinks, D]
    or None, B: sequences or more; of rows their first tokens.
    """

    launch: Any = staticmethod(launch)

    def __init__(
        self,
        tensors: Sequence[Any],
        config: AttentionConfig,
        scale: float,
        softcap: float | None,
        layout: Layout | None = None,
        sums: Sums | None = None,
    ) -> None:
        self.q, self.k, self.v, self.window_factor, *maps, self.sink_logits, self.sink_k, self.sink_v = tensors[:11]
        self.maps, self.layout = FeatureMaps(*maps), layout or Layout(None, *tensors[11:])
        self.config, self.scale, self.softcap, self.sums = config, scale, softcap, sums
        if config.sinks and self.layout.table is None:
            self.sink_k, self.sink_v = self.k[:, :, : config.sinks], self.v[:, :, : config.sinks]

    @cached_property
    def inputs(self) -> Inputs:
        q, k, v, sink_k, sink_v = map(rows, (self.q, self.k, self.v, self.sink_k, self.sink_v))
        return Inputs(q, k, v, self.window_factor, self.maps, self.sink_logits, sink_k, sink_v, self.layout)

    @cached_property
    def wide(self) -> bool:
        return is_wide(self.q.shape[3], self.q.dtype)

    @property
    def narrow(self) -> bool:
        return self.shape.DB * self.q.dtype.itemsize == 128 and not self.shape.INNER  # 64 dimensions, half precision

    @cached_property
    def shape(self) -> KernelShape:
        heads = self.q.shape[1], self.k.shape[1], self.state_heads
        columns = 1 if self.maps.k_weight is None else self.maps.k_weight.shape[2]
        return KernelShape.of(self.config, self.q.dtype, *heads, self.q.shape[3], columns)

    @cached_property
    def state_heads(self) -> int:
        return self.k.shape[1] if self.maps.k_weight is None else self.maps.k_weight.shape[0]

    @cached_property
    def lists(self) -> tuple[int, int]:
        """How many lists of chunks there are, one per row, or one for all rows of a ragged batch; and their length."""
        batch, _, tokens, _ = self.q.shape
        return (batch, cdiv(tokens, STATE_CHUNK)) if self.layout.slots is None else (1, self.layout.slots.shape[0])

    @cached_property
    def tiles(self) -> tuple[int]:
        """Programs of kernels that take a tile of C queries of one head."""
        return (self.lists[0] * self.q.shape[1] * self.lists[1],)

    @cached_property
    def counts(self) -> tuple[int, int, int]:
        """Tokens, chunks and key/value heads, as nearly all kernels take them."""
        return self.q.shape[2], self.lists[1], self.k.shape[1]

    @cached_property
    def sinks_there(self) -> int:
        return 0 if self.sink_k is None else self.sink_k.shape[2]

    def empty_rows(self, *more: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for something of every query: [B, H, T, *more]."""
        return self.q.new_empty((*self.q.shape[:3], *more), dtype=dtype)

    def empty_tiles(self, *more: int) -> Tensor:
        """Memory for something of every tile of C queries: [B, H, N, *more], float32."""
        count, chunks = self.lists
        return self.q.new_empty((count, self.q.shape[1], chunks, *more), dtype=torch.float32)


class Segments(NamedTuple):
    """M segments, cut into chunks of STATE_CHUNK tokens.

    Attributes:
        table: int32 [M + 1, 5], a row per segment: its first token, its tokens with padding, without padding, its
            first chunk, and `joined`. The last row is an empty segment.
            joined: where a segment continues the sums of the one before it, the chunks of that one; -1 there; else 0.
        slots: int32 [L], the segment of every chunk; M for the chunks that are left over, because L is a bound
            that needs no look at the GPU's memory.
    """

    table: Tensor
    slots: Tensor

    @classmethod
    def of_borders(cls, cu_seqlens: Tensor, tokens: int) -> Segments:
        """N sequences packed into a row of `tokens` tokens, with the borders [N + 1]; then padding."""
        border_N = cu_seqlens.long().clamp(0, tokens)
        return cls.of_lengths(border_N, pad(border_N.diff(), (0, 1)), tokens)

    @classmethod
    def of_lengths(cls, first_M: Tensor, length_M: Tensor, tokens: int, cut_M: Tensor | None = None) -> Segments:
        """Segments that begin at `first_M`, the rest of each, after its length, being padding. Where `cut_M`, a segment
        has none, and the next one continues it."""
        cells_M = pad(first_M, (0, 1), value=tokens).diff()
        count_M = (cells_M + STATE_CHUNK - 1) // STATE_CHUNK
        end_M = count_M.cumsum(0)
        joined_M = torch.zeros_like(count_M)
        if cut_M is not None:
            joined_M = torch.where(cut_M, -1, torch.where(cut_M.roll(1), count_M.roll(1), 0))
        table = pad(torch.stack([first_M, cells_M, length_M, end_M - count_M, joined_M], 1), (0, 0, 0, 1))
        bound = tokens // STATE_CHUNK + len(first_M)
        slots = torch.searchsorted(end_M, torch.arange(bound, device=end_M.device), right=True)
        return cls(table.int(), slots.int())
