"""Where the sequences of a packed row lie: the table by which the kernels find the sequence of a chunk.

Segments cover all tokens of the row, the last one the padding after the sequences, so that whatever the kernels write
is written everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lolcats.ops.hybrid_attention.kernels.operands import STATE_CHUNK


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
