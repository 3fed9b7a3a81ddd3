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
            return new_BHTD.to(dtype).take_along_dim(self.token_B1E1, 2)
        return torch.cat([ring_BHCD.to(dtype), new_BHTD.to(dtype)], dim=2).take_along_dim(self.source_B1E1, 2)

    @cached_property
    def picked_B1T1(self) -> Tensor:
        """The entry of every new token."""
        return (self.prior_B[:, None] + self.index_E[: self.tokens])[:, None, :, None]

    @cached_property
    def token_B1E1(self) -> Tensor:
        """The new token of every entry; any, where there is none."""
        return (self.index_E - self.prior_B[:, None]).clamp(0, max(self.tokens - 1, 0))[:, None, :, None]

    @cached_property
    def source_B1E1(self) -> Tensor:
        """The place of every entry among the ring's slots and then the new tokens."""
        base_B1E1, prior_B1E1 = (x[:, None, None, None] for x in (self.base_B, self.prior_B))
        index_E1 = self.index_E[:, None]
        slot_B1E1 = (base_B1E1 + index_E1) % self.capacity
        return torch.where(index_E1 < prior_B1E1, slot_B1E1, self.token_B1E1 + self.capacity)

    def pick(self, y_BHED: Tensor) -> Tensor:
        """The new tokens' entries: [B, H, T, D]."""
        if self.fresh:
            return y_BHED[:, :, : self.tokens]
        return y_BHED.take_along_dim(self.picked_B1T1, 2)
