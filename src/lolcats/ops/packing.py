"""Padded and packed batches as one row of tokens, one sequence after the other, and back."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Packing:
    """Which tokens of a batch [B, T] are real, and which form a sequence.

    Attributes:
        cu_seqlens: int32 [sequences + 1], their borders in a row of N tokens, from 0; padding may follow.
        token_N: the row's tokens by their place among the batch's B * T; None: all of them, in order.
        documents: `cu_seqlens` on the CPU, if rows of the batch hold several sequences; else sequence b is row b's.
        shared: what layers computed from these borders, for others.
    """

    cu_seqlens: Tensor
    token_N: Tensor | None = None
    documents: Tensor | None = None
    shared: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def of_mask(cls, real_BT: Tensor) -> Packing | None:
        """Without the tokens that are padding; None: there are none. Reads their number back from the GPU."""
        token_N = real_BT.flatten().nonzero()[:, 0]
        if len(token_N) == real_BT.numel():
            return None
        return cls(pad(real_BT.sum(1).cumsum(0), (1, 0)).int(), token_N)

    def to(self, device: torch.device) -> Packing:
        token_N = None if self.token_N is None else self.token_N.to(device)
        return replace(self, cu_seqlens=self.cu_seqlens.to(device), token_N=token_N)

    def pack(self, x_BHTD: Tensor) -> Tensor:
        """[B, H, T, D] -> [1, H, N, D]."""
        x_MHD = x_BHTD.transpose(1, 2).flatten(0, 1)
        if self.token_N is not None:
            x_MHD = x_MHD.index_select(0, self.token_N)
        return x_MHD.transpose(0, 1)[None]

    def unpack(self, y_1HND: Tensor, batch: int, tokens: int) -> Tensor:
        """The inverse, with zeros for padding."""
        y_MHD = y_1HND[0].transpose(0, 1)
        if self.token_N is not None:
            y_MHD = y_MHD.new_zeros(batch * tokens, *y_MHD.shape[1:]).index_copy(0, self.token_N, y_MHD)
        return y_MHD.unflatten(0, (batch, tokens)).transpose(1, 2)
