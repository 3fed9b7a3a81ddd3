"""What a call gives to the kernels: its tensors, their strides, and the compile-time constants that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.ops.hybrid_attention.kernels.constants import INTERPRETED, STATE_CHUNK
from lolcats.ops.hybrid_attention.kernels.tiles import padded
from lolcats.ops.hybrid_attention.kernels.tuning import Tuned

# From this many tiles of 64 queries on, throughput counts and not latency: eight for each multiprocessor.
CROWDED_TILES = 1024


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
    spec: AttentionConfig
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
            reach = spec.window_blocks * spec.window_size - math.gcd(spec.window_size, STATE_CHUNK)
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
            "BLOCKS": spec.window_blocks,
            "SINKS": spec.sinks,
            "HORIZON": spec.linear_length_cap,
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


def strides(tensor: Tensor | None) -> tuple[int, int, int]:
    """Batch, head and token strides of [B, H, T, D]."""
    if tensor is None:
        return 0, 0, 0
    batch, head, token, _ = tensor.stride()
    return batch, head, token


def or_dummy(tensor: Tensor | None, like: Tensor) -> Tensor:
    """A pointer that is never read in place of a missing tensor."""
    return like if tensor is None else tensor
