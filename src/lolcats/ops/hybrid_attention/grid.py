"""The grid on which tokens lie in chunks: new ones, after those that wait in the ring of a state."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from lolcats.config.attention import AttentionConfig

MIN_CHUNK_TOKENS = 64


class Grid:
    """Where old and new tokens lie on the grid: entry e of sequence b is the token at base_B[b] + e.

    The grid of a sequence starts at the first token that is not in the state's sums yet; the first
    `prior_B` entries come from the state's ring.
    """

    def __init__(self, config: AttentionConfig, position_B: Tensor, tokens: int, *, fresh: bool) -> None:
        self.fresh, self.tokens, self.capacity = fresh, tokens, config.capacity
        if fresh and config.window_size > tokens:  # all in the window anyhow: no wider grid than needed
            config = replace(config, window_size=tokens)
        self.config = config
        self.chunk = MIN_CHUNK_TOKENS
        if config.window == "terraced" and config.window_size > 0:
            self.chunk = config.window_size * -(-MIN_CHUNK_TOKENS // config.window_size)
        entries = tokens if fresh else tokens + self.capacity
        self.chunks = max(-(-entries // self.chunk), 1)
        self.entries = self.chunks * self.chunk
        self.base_B = config.window_start(position_B - 1)
        self.prior_B = position_B - self.base_B
        self.index_E = torch.arange(self.entries, device=position_B.device)

    def place(self, new_BHTD: Tensor, ring_BHCD: Tensor | None, dtype: torch.dtype) -> Tensor:
        """New tokens, after those in the ring if given, on the grid: [B, H, E, D] in `dtype`."""
        if self.fresh:
            return pad(new_BHTD.to(dtype), (0, 0, 0, self.entries - self.tokens))
        if ring_BHCD is None or self.capacity == 0:
            return _gather(new_BHTD.to(dtype), self.token_BE)
        return _gather(torch.cat([ring_BHCD.to(dtype), new_BHTD.to(dtype)], dim=2), self.source_BE)

    @cached_property
    def picked_BT(self) -> Tensor:
        """The entry of every new token."""
        return self.prior_B[:, None] + self.index_E[: self.tokens]

    @cached_property
    def token_BE(self) -> Tensor:
        """The new token of every entry; any, where there is none."""
        return (self.index_E - self.prior_B[:, None]).clamp(0, max(self.tokens - 1, 0))

    @cached_property
    def source_BE(self) -> Tensor:
        """The place of every entry among the ring's slots and then the new tokens."""
        slot_BE = (self.base_B[:, None] + self.index_E) % self.capacity
        return torch.where(self.index_E < self.prior_B[:, None], slot_BE, self.token_BE + self.capacity)

    def pick(self, y_BHED: Tensor) -> Tensor:
        """The new tokens' entries: [B, H, T, D]."""
        if self.fresh:
            return y_BHED[:, :, : self.tokens]
        return _gather(y_BHED, self.picked_BT)


def _gather(x_BHTD: Tensor, index_BE: Tensor) -> Tensor:
    """Tokens by index, per sequence: [B, H, E, D]."""
    index = index_BE[:, None, :, None].expand(-1, x_BHTD.shape[1], -1, x_BHTD.shape[3])
    return x_BHTD.gather(2, index)
