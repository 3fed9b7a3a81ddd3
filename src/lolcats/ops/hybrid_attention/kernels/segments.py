"""Where the sequences of a ragged batch lie: the table by which the kernels find the sequence of a chunk.

A segment is a run of tokens of one row of the batch: a sequence, or padding, or a sequence with padding after
it. The segments of a batch cover all of its tokens, so that whatever the kernels write is written everywhere.
Sequences that resume from states get a grid of their own: the tokens in their rings, then the new ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.kernels.shape import STATE_CHUNK
from lolcats.ops.hybrid_attention.remember import remembered
from lolcats.ops.hybrid_attention.state import HybridState


@dataclass(frozen=True)
class Segments:
    """M segments, cut into chunks of STATE_CHUNK tokens.

    Attributes:
        table: int32 [M + 1, 5], a row per segment: its row in the batch, its first token, its tokens with padding,
            without padding, and its first chunk. The last row is an empty segment.
        slots: int32 [L], the segment of every chunk; M for the chunks that are left over, because L is a bound
            that needs no look at the GPU's memory.
    """

    table: Tensor
    slots: Tensor

    def places(self, count: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Row in the batch, first token, and tokens of the first `count` segments (None: all), int64."""
        row, start, tokens = remembered(_places, self.table)
        return row[:count], start[:count], tokens[:count]


def _places(table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    row, start, _, tokens, _ = table[:-1].long().unbind(1)
    return row, start, tokens


def from_borders(cu_seqlens: Tensor, tokens: int) -> Segments:
    """N sequences one behind the other in one row of `tokens` tokens, with the borders [N + 1]; then padding."""
    border_N = cu_seqlens.clamp(0, tokens)
    length_M = pad(border_N.diff(), (0, 1))
    cells_M = pad(border_N, (0, 1), value=tokens).diff()
    return build(torch.zeros_like(border_N), border_N, cells_M, length_M, tokens)


def from_mask(mask_BT: Tensor) -> Segments | None:
    """Segment b is the sequence of row b; None if there is padding between the tokens of a row.

    Reads one flag back from the GPU.
    """
    batch, tokens = mask_BT.shape
    real_BT = mask_BT.bool()
    length_B = real_BT.sum(1)
    first_B = real_BT.to(torch.int8).argmax(1)
    index_T = torch.arange(tokens, device=mask_BT.device)
    between_BT = (index_T >= first_B[:, None]) & (index_T < (first_B + length_B)[:, None])
    if not bool((between_BT == real_BT).all()):
        return None
    end_B, zero_B = first_B + length_B, torch.zeros_like(first_B)
    return build(
        torch.arange(batch, device=mask_BT.device).repeat(3),
        torch.cat([first_B, zero_B, end_B]),
        torch.cat([length_B, first_B, tokens - end_B]),
        torch.cat([length_B, zero_B, zero_B]),
        batch * tokens,
    )


def from_ids(segment_ids_BT: Tensor) -> Segments:
    """One segment per run of equal ids in a row; negative ids are padding. Reads their number back from the GPU."""
    batch, tokens = segment_ids_BT.shape
    begins_BT = torch.ones_like(segment_ids_BT, dtype=torch.bool)
    begins_BT[:, 1:] = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    first_M = begins_BT.flatten().nonzero()[:, 0]
    cells_M = pad(first_M, (0, 1), value=batch * tokens).diff()
    is_real_M = segment_ids_BT.flatten()[first_M] >= 0
    return build(first_M // tokens, first_M % tokens, cells_M, cells_M * is_real_M, batch * tokens)


def build(row_M: Tensor, start_M: Tensor, cells_M: Tensor, length_M: Tensor, total: int) -> Segments:
    """The columns of the table, but the last; `total`: at least the sum of `cells_M`."""
    count_M = (cells_M + STATE_CHUNK - 1) // STATE_CHUNK
    end_M = count_M.cumsum(0)
    table = pad(torch.stack([row_M, start_M, cells_M, length_M, end_M - count_M], 1), (0, 0, 0, 1))
    bound = total // STATE_CHUNK + len(row_M)
    slots = torch.searchsorted(end_M, torch.arange(bound, device=end_M.device), right=True)
    return Segments(table.int(), slots.int())


@torch.library.custom_op("lolcats::segments_of_ids", mutates_args=())
def segments_of_ids_op(segment_ids: Tensor) -> tuple[Tensor, Tensor]:
    """`from_ids` for torch.compile, which cannot know how many segments there are."""
    segments = from_ids(segment_ids)
    return segments.table, segments.slots


@segments_of_ids_op.register_fake
def _(segment_ids):
    context = torch.library.get_ctx()
    table = segment_ids.new_empty(context.new_dynamic_size(), 5, dtype=torch.int32)
    return table, segment_ids.new_empty(context.new_dynamic_size(), dtype=torch.int32)


def of_borders(cu_seqlens: Tensor, tokens: int) -> Segments:
    """See `from_borders`."""
    return remembered(from_borders, cu_seqlens, tokens)


def of_mask(mask_BT: Tensor) -> Segments | None:
    """See `from_mask`; None also where the mask cannot be looked at."""
    if torch.compiler.is_compiling() or (mask_BT.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return remembered(from_mask, mask_BT)


def of_ids(segment_ids_BT: Tensor) -> Segments:
    """See `from_ids`."""
    if torch.compiler.is_compiling():
        return Segments(*segments_of_ids_op(segment_ids_BT))
    return remembered(from_ids, segment_ids_BT)


class PackedGrid:
    """One row of E = T + N * capacity entries: of every sequence the tokens of its ring that are in no sum yet,
    then its new tokens, then what is left of `capacity` entries as padding.

    Attributes:
        segments: of the N sequences, and the padding after the last.
        base_B: [N] position of each sequence's first entry.
    """

    def __init__(self, config: AttentionConfig, state: HybridState, cu_seqlens: Tensor, tokens: int) -> None:
        count, device = len(cu_seqlens) - 1, cu_seqlens.device
        self.capacity, self.tokens = config.capacity, tokens
        self.border_N = cu_seqlens.long().clamp(0, tokens)
        self.base_B = config.window_start(state.position - 1)
        self.prior_N = state.position - self.base_B
        first_N = self.border_N + torch.arange(count + 1, device=device) * self.capacity  # and the end of the last
        self.first_N, self.entries = first_N[:-1], tokens + count * self.capacity

        length_N = self.border_N.diff()
        self.segments = build(
            torch.zeros_like(first_N),
            first_N,
            pad(first_N, (0, 1), value=self.entries).diff(),
            pad(self.prior_N + length_N, (0, 1)),
            self.entries,
        )
        index_E = torch.arange(self.entries, device=device)
        n_E = (torch.searchsorted(self.first_N, index_E, right=True) - 1).clamp_min(0)
        entry_E = index_E - self.first_N[n_E]
        offset_E = entry_E - self.prior_N[n_E]
        # Entries of the ring get some token's query, whose output is not picked; padding may hold anything.
        last = self.border_N[-1] - 1
        self.token_E = torch.minimum(self.border_N[n_E] + offset_E, last).clamp_min(0)
        slot_E = n_E * self.capacity + (self.base_B[n_E] + entry_E) % max(self.capacity, 1)
        self.source_E = torch.where(offset_E < 0, slot_E, count * self.capacity + self.token_E)

    def place(self, new_1HTD: Tensor, ring_NHCD: Tensor | None, dtype: torch.dtype) -> Tensor:
        """New tokens, with those in the ring if given, on the grid: [1, H, E, D] in `dtype`."""
        new_1HTD = new_1HTD.to(dtype)
        if ring_NHCD is None or self.capacity == 0:
            return new_1HTD.index_select(2, self.token_E)
        ring_1HMD = ring_NHCD.to(dtype).transpose(0, 1).flatten(1, 2)[None]
        return torch.cat([ring_1HMD, new_1HTD], dim=2).index_select(2, self.source_E)

    def pick(self, y_1HED: Tensor) -> Tensor:
        """The new tokens' entries: [1, H, T, D]; zero for tokens of no sequence."""
        index_T = torch.arange(self.tokens, device=y_1HED.device)
        n_T = torch.searchsorted(self.border_N[1:], index_T, right=True).clamp_max(len(self.first_N) - 1)
        entry_T = index_T - self.border_N[n_T] + self.first_N[n_T] + self.prior_N[n_T]
        y_1HTD = y_1HED.index_select(2, entry_T.clamp_max(self.entries - 1))
        return y_1HTD.masked_fill((index_T >= self.border_N[-1])[:, None], 0.0)
