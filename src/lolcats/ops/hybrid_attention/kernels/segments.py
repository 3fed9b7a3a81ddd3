"""Where the sequences of a ragged batch lie: the table by which the kernels find the sequence of a chunk.

A segment is a run of tokens of one row of the batch: a sequence, or padding, or a sequence with padding after
it. The segments of a batch cover all of its tokens, so that whatever the kernels write is written everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lolcats.ops.hybrid_attention.kernels.constants import STATE_CHUNK
from lolcats.ops.hybrid_attention.remember import remembered


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
