"""Padding and packed documents: every layout becomes rows that start at token 0 and end in padding.

`mask` (left, right or any padding), `segment_ids` (several documents in a row) and `cu_seqlens` (borders of
sequences in one row) are ways of saying which tokens form a sequence. All are turned into one gather, so that
implementations only know a length per row. The GPU kernels need none (see `kernels.segments`), except where a
mask has padding between tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Where the tokens of a [B, T] batch go in left-aligned rows [N, L].

    Attributes:
        source_NL: flat index b * T + t of the token in each cell (any valid index in padding cells).
        target_BT: flat index n * L + l of the cell of each token (any valid index for padding tokens).
        real_BT: bool, False for padding tokens.
        length_N: tokens in each row.
    """

    source_NL: Tensor
    target_BT: Tensor
    real_BT: Tensor
    length_N: Tensor

    def align(self, x_BHTD: Tensor) -> Tensor:
        """[B, H, T, D] -> [N, H, L, D]."""
        return _take(x_BHTD, self.source_NL)

    def restore(self, x_NHLD: Tensor) -> Tensor:
        """[N, H, L, D] -> [B, H, T, D]; padding tokens become zero."""
        x_BHTD = _take(x_NHLD, self.target_BT)
        return x_BHTD.masked_fill(~self.real_BT[:, None, :, None], 0.0)


def rows_from_mask(mask_BT: Tensor) -> Rows:
    """One row per sequence of the batch; tokens where the mask is False do not exist."""
    batch, tokens = mask_BT.shape
    real_BT = mask_BT.bool()
    order_BT = torch.argsort((~real_BT).to(torch.int8), dim=1, stable=True)
    offset_B1 = torch.arange(batch, device=mask_BT.device)[:, None] * tokens
    rank_BT = (real_BT.cumsum(1) - 1).clamp_min(0)
    return Rows(order_BT + offset_B1, rank_BT + offset_B1, real_BT, real_BT.sum(1))


def rows_from_segments(segment_ids_BT: Tensor) -> Rows:
    """One row per document: a maximal run of equal ids in a sequence of the batch; ids < 0 are padding."""
    batch, tokens = segment_ids_BT.shape
    real_BT = segment_ids_BT >= 0
    changed_BT = torch.ones_like(real_BT)
    changed_BT[:, 1:] = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    starts = (changed_BT & real_BT).flatten()
    flat = torch.arange(batch * tokens, device=segment_ids_BT.device)
    if not bool(starts.any()):
        empty = torch.zeros(1, 1, dtype=torch.int64, device=flat.device)
        return Rows(empty, torch.zeros_like(segment_ids_BT, dtype=torch.int64), real_BT, empty[0])

    row = (starts.cumsum(0) - 1).clamp_min(0)
    begin_N = flat[starts]
    real = real_BT.flatten()
    length_N = torch.zeros_like(begin_N).index_add_(0, row[real], torch.ones_like(row[real]))
    longest = int(length_N.max())
    source_NL = (begin_N[:, None] + torch.arange(longest, device=flat.device)).clamp_max(batch * tokens - 1)
    target = row * longest + (flat - begin_N[row]).clamp(0, longest - 1)
    return Rows(source_NL, target.view(batch, tokens), real_BT, length_N)


def rows_from_borders(cu_seqlens_N: Tensor, tokens: int) -> Rows:
    """One row per sequence; sequence n is the tokens from border n to border n + 1 of a batch of one row."""
    border_N = cu_seqlens_N.long()
    length_N = border_N.diff()
    longest = max(int(length_N.max()), min(tokens, 1))
    index_T = torch.arange(tokens, device=border_N.device)
    source_NL = (border_N[:-1, None] + torch.arange(longest, device=border_N.device)).clamp_max(tokens - 1)
    row_T = torch.searchsorted(border_N[1:], index_T, right=True).clamp_max(len(length_N) - 1)
    target_T = row_T * longest + (index_T - border_N[row_T]).clamp_max(longest - 1)
    return Rows(source_NL, target_T[None], (index_T < border_N[-1])[None], length_N)


def by_length(rows: Rows, shortest: int = 64) -> list[Rows]:
    """The same rows in groups of similar length, so that there is at most about one padding cell for each token.

    Every token is real in exactly one group, so the sum of what the groups restore is the whole. Lengths up to
    `shortest` count as similar.
    """
    count, longest = rows.source_NL.shape
    if count * longest <= 2 * rows.real_BT.numel():
        return [rows]
    row_BT = rows.target_BT // longest
    column_BT = rows.target_BT % longest
    class_N = rows.length_N.clamp_min(shortest).double().log2().ceil().long()
    groups = []
    for size_class in class_N.unique().tolist():
        inside_N = class_N == size_class
        length = max(int(rows.length_N[inside_N].max()), 1)  # a cell for the padding, if there is no token
        rank_N = inside_N.cumsum(0) - 1
        target_BT = rank_N[row_BT] * length + column_BT
        real_BT = rows.real_BT & inside_N[row_BT]
        groups.append(
            Rows(
                rows.source_NL[inside_N, :length],
                torch.where(real_BT, target_BT, 0),
                real_BT,
                rows.length_N[inside_N],
            )
        )
    return groups


def _take(x_BHTD: Tensor, index_NL: Tensor) -> Tensor:
    """Rows of tokens by flat index over (batch, token)."""
    flat_MHD = x_BHTD.transpose(1, 2).flatten(0, 1)
    return flat_MHD[index_NL].transpose(1, 2)
