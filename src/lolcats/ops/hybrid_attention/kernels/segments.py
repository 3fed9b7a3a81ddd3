"""Where the sequences of a packed row lie: the table by which the kernels find the sequence of a chunk.

Segments cover all tokens of the row, the last one the padding after the sequences, so that whatever the kernels write
is written everywhere. Sequences that resume from states get a grid of their own: the tokens in their rings, then the
new ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.kernels.operands import STATE_CHUNK


class Segments(NamedTuple):
    """M segments, cut into chunks of STATE_CHUNK tokens.

    Attributes:
        table: int32 [M + 1, 4], a row per segment: its first token, its tokens with padding, without padding, and its
            first chunk. The last row is an empty segment.
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
    def of_lengths(cls, first_M: Tensor, length_M: Tensor, tokens: int) -> Segments:
        """Segments that begin at `first_M`, the rest of each, after its length, being padding."""
        cells_M = pad(first_M, (0, 1), value=tokens).diff()
        count_M = (cells_M + STATE_CHUNK - 1) // STATE_CHUNK
        end_M = count_M.cumsum(0)
        table = pad(torch.stack([first_M, cells_M, length_M, end_M - count_M], 1), (0, 0, 0, 1))
        bound = tokens // STATE_CHUNK + len(first_M)
        slots = torch.searchsorted(end_M, torch.arange(bound, device=end_M.device), right=True)
        return cls(table.int(), slots.int())


class PackedGrid:
    """One row of E = T + N * capacity entries: of every sequence the tokens of its ring that are in no sum yet,
    then its new tokens, then what is left of `capacity` entries as padding.

    Attributes:
        segments: of the N sequences, and the padding after the last.
        base_N: [N] position of each sequence's first entry.
    """

    def __init__(self, config: AttentionConfig, position_N: Tensor, cu_seqlens: Tensor, tokens: int) -> None:
        count, self.capacity = len(cu_seqlens) - 1, config.capacity
        border_N = cu_seqlens.long().clamp(0, tokens)
        self.base_N = config.window_start(position_N - 1)
        prior_N = position_N - self.base_N
        end = tokens + count * self.capacity
        index_E = torch.arange(end, device=border_N.device)
        first_N = border_N + torch.arange(count + 1, device=border_N.device) * self.capacity  # and the end of the last
        self.segments = Segments.of_lengths(first_N, pad(prior_N + border_N.diff(), (0, 1)), end)

        n_E = (torch.searchsorted(first_N[:-1], index_E, right=True) - 1).clamp_min(0)
        entry_E = index_E - first_N[n_E]
        offset_E = entry_E - prior_N[n_E]
        # Entries of the ring get some token's query, whose output is not picked; padding may hold anything.
        self.token_E = torch.minimum(border_N[n_E] + offset_E, border_N[-1] - 1).clamp_min(0)
        slot_E = n_E * self.capacity + (self.base_N[n_E] + entry_E) % max(self.capacity, 1)
        self.source_E = torch.where(offset_E < 0, slot_E, count * self.capacity + self.token_E)

        index_T = index_E[:tokens]
        n_T = torch.searchsorted(border_N[1:], index_T, right=True).clamp_max(count - 1)
        entry_T = index_T - border_N[n_T] + first_N[n_T] + prior_N[n_T]
        self.entry_T = torch.where(index_T < border_N[-1], entry_T, end - 1)  # the last is padding, if there is any

    def place(self, new_1HTD: Tensor, ring_NHCD: Tensor | None, dtype: torch.dtype) -> Tensor:
        """New tokens, with those in the ring if given, on the grid: [1, H, E, D] in `dtype`."""
        new_1HTD = new_1HTD.to(dtype)
        if ring_NHCD is None or self.capacity == 0:
            return new_1HTD.index_select(2, self.token_E)
        ring_1HMD = ring_NHCD.to(dtype).transpose(0, 1).flatten(1, 2)[None]
        return torch.cat([ring_1HMD, new_1HTD], dim=2).index_select(2, self.source_E)

    def pick(self, y_1HED: Tensor) -> Tensor:
        """The new tokens' entries: [1, H, T, D]; zero for tokens of no sequence."""
        return y_1HED.index_select(2, self.entry_T)
