"""What the hybrid attention computes: its static description and its tensors.

For a query at position n (counted from the start of its sequence) the keys j <= n fall into two parts:

    softmax part   window_start(n) <= j, or j < sinks
    linear part    sinks <= j < window_start(n)

and with W = softmax part, O = linear part, c_n = max over W of the scores s_nj = q_n . k_j * scale

    y_n = ( gamma * sum_W exp(s_nj - c_n) v_j + phi_q(q_n) . sum_O phi_k(k_j) v_j^T )
        / ( gamma * sum_W exp(s_nj - c_n)     + phi_q(q_n) . sum_O phi_k(k_j)       )

(arXiv:2410.10254, equation hybrid_linear_swa). c_n scales only the window's terms, so it belongs to the
function and to its gradient. With a sparse cache (see `sparse_cache`) some of O's keys move to W.

With a linear length cap h the terms of O are multiplied by min(1, h / (n + 1)): the sum over ever more keys weighs no
more than it would at h tokens. Implementations multiply gamma by max(1, (n + 1) / h) instead, which is the same
quotient.

Shape suffixes used throughout: B batch, H query heads, G key/value heads, R = H / G query heads per
key/value head, S state heads (G or H), T tokens, D head_dim, P columns of the projection, F features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

# Keeps the quotient defined where every feature product underflows or is exactly zero (ReLU features).
DENOMINATOR_FLOOR = 1e-12


@dataclass(frozen=True)
class HybridSpec:
    """The static part of the function; hashable.

    Attributes:
        window: "sliding", the last `window_size` tokens including the query's own; or "terraced", the
            query's block of `window_size` tokens and the `blocks - 1` blocks before it, counted from the
            sequence start.
        window_size: tokens; 0 leaves only linear attention.
        blocks: blocks in the terraced window, at least 1.
        sinks: tokens at the sequence start that are in the softmax part of every query.
        feature_map: a registered name (see `feature_maps`), or None for no linear part at all.
        sparse_cache: tokens per key/value head that stay in the softmax part after they left the window.
        cache_by: which ones: "recall", those that the state would recall worst; "leverage", those whose keys
            are least like the others (see `sparse_cache`).
        decay: the linear part forgets by a fixed factor per token and head (see `retention`; no window).
        normalizer: "sum", the denominator above; "group_norm" over a head's outputs in its place (no window).
        linear_length_cap: tokens from which on the linear part weighs no more than it would at that many; 0: never.
            For texts longer than those of training.
    """

    window: Literal["sliding", "terraced"] = "terraced"
    window_size: int = 64
    blocks: int = 2
    sinks: int = 0
    feature_map: str | None = "hedgehog"
    sparse_cache: int = 0
    cache_by: Literal["recall", "leverage"] = "recall"
    decay: bool = False
    normalizer: Literal["sum", "group_norm"] = "sum"
    linear_length_cap: int = 0

    def __post_init__(self) -> None:
        if self.window not in ("sliding", "terraced"):
            raise ValueError(f"window={self.window!r}: expected 'sliding' or 'terraced'")
        if self.window_size < 0 or self.blocks < 1 or self.sinks < 0:
            raise ValueError(
                f"expected window_size >= 0, blocks >= 1, sinks >= 0; got window_size={self.window_size},"
                f" blocks={self.blocks}, sinks={self.sinks}"
            )
        if self.window_size == 0 and self.feature_map is None:
            raise ValueError("window_size=0 without a feature_map leaves nothing to attend to; set one of them")
        if self.normalizer not in ("sum", "group_norm"):
            raise ValueError(f"normalizer={self.normalizer!r}: expected 'sum' or 'group_norm'")
        if self.is_retention and (self.has_softmax or self.sparse_cache):
            raise ValueError(
                "decay and normalizer='group_norm' are for linear attention alone: set window_size, sinks and"
                f" sparse_cache to 0; got {self.window_size}, {self.sinks} and {self.sparse_cache}"
            )
        if self.cache_by not in ("recall", "leverage"):
            raise ValueError(f"cache_by={self.cache_by!r}: expected 'recall' or 'leverage'")
        if self.sparse_cache < 0:
            raise ValueError(f"sparse_cache={self.sparse_cache}: expected at least 0")
        if self.sparse_cache > 0 and (self.window != "terraced" or self.window_size == 0 or self.feature_map is None):
            raise ValueError(
                "sparse_cache needs a terraced window, of which whole blocks leave, and a linear part for the rest;"
                f" got window={self.window!r}, window_size={self.window_size}, feature_map={self.feature_map!r}"
            )
        if self.linear_length_cap < 0:
            raise ValueError(f"linear_length_cap={self.linear_length_cap}: expected at least 0")
        if self.linear_length_cap > 0 and (not self.has_softmax or self.feature_map is None):
            raise ValueError(
                "linear_length_cap weighs the linear part against the softmax part and needs both: a feature_map,"
                f" and a window or sinks; got feature_map={self.feature_map!r}, window_size={self.window_size} and"
                f" sinks={self.sinks}"
            )
        if self.feature_map is not None:
            from lolcats.ops.hybrid_attention.feature_maps import get_feature_map

            get_feature_map(self.feature_map)

    @property
    def has_softmax(self) -> bool:
        """Whether any key can be in the softmax part."""
        return self.window_size > 0 or self.sinks > 0

    @property
    def is_retention(self) -> bool:
        """Whether this is not the equation above but that of `retention`."""
        return self.decay or self.normalizer != "sum"

    @property
    def reach(self) -> int:
        """Distance d by which keys enter the linear part late: a key is in the linear part of a query
        only if it is at least d (sliding) or d / window_size whole blocks (terraced) older."""
        return self.window_size * (self.blocks - 1 if self.window == "terraced" else 1)

    @property
    def capacity(self) -> int:
        """Slots of the state's ring of keys and values: the most tokens a window can hold."""
        return self.window_size * (self.blocks if self.window == "terraced" else 1)

    def moment_rows(self, head_dim: int) -> int:
        """Rows of `HybridState.key_moment`; 0: nothing is cached by leverage."""
        return head_dim + 1 if self.sparse_cache > 0 and self.cache_by == "leverage" else 0

    def window_start(self, position: Tensor) -> Tensor:
        """First key position in the window of a query at `position` (int tensor, any shape); >= 0."""
        if self.window == "sliding" or self.window_size == 0:
            start = position - self.window_size + 1
        else:
            start = (torch.div(position, self.window_size, rounding_mode="floor") - self.blocks + 1) * self.window_size
        return start.clamp_min(0)

    def gamma_at(self, gamma: Tensor, position: Tensor) -> Tensor:
        """`gamma` of queries at `position` (int tensor that broadcasts with it), with the length cap's factor."""
        if self.linear_length_cap == 0:
            return gamma
        return gamma * ((position + 1).to(gamma.dtype) / self.linear_length_cap).clamp_min(1.0)

    def within(self, tokens: int) -> HybridSpec:
        """The same function for whole sequences of up to `tokens` tokens: no length cap that none of them passes."""
        return (
            replace(self, linear_length_cap=0)
            if self.linear_length_cap > 0 and tokens <= self.linear_length_cap
            else self
        )

    def block_leaves(self, position: Any) -> Any:
        """Whether a block leaves the terraced window as the token at `position` comes; of an int, or an int tensor."""
        return (position % self.window_size == 0) & (position >= self.capacity)

    def block_evicted(self, positions: Iterable[int]) -> bool:
        """What a caller that knows where its sequences are tells `hybrid_attention` when each gets a token.

        True without a sparse cache: only with one does it take many operations to look.
        """
        return self.sparse_cache == 0 or any(map(self.block_leaves, positions))


class HybridParams(NamedTuple):
    """The learnable tensors of one layer.

    Attributes:
        gamma: [H] factor of the window's terms, in (0, 1).
        q_weight: [H, D, P] projection of the query feature map, or None without a linear part.
        k_weight: [S, D, P] projection of the key feature map. S = G shares one state among the R query
            heads of a group; S = H keeps one state per query head.
        q_bias, k_bias: [H, P], [S, P] or None.
        sink_logits: [H] or None; an extra score without a value in every softmax part (GPT-OSS).
    """

    gamma: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    sink_logits: Tensor | None = None
