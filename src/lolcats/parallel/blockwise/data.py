"""Batches of a block: the sequences' tokens and positions with the hidden states that the block starts from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lolcats.data import PackedDataset
from lolcats.parallel.blockwise.forward import HIDDEN

ROWS = "rows"
"""Key, in a batch, of the numbers [B] of its sequences."""


class HiddenSource(Protocol):
    """Where a block's inputs come from: a cache, or the process that holds the block before."""

    def read(self, rows: np.ndarray) -> Tensor:
        """The hidden states [B, T, hidden] of the sequences `rows` [B]."""


@dataclass(frozen=True, eq=False)
class BlockData(PackedDataset):
    """A packed dataset whose batches also hold their sequences' numbers and hidden states."""

    source: HiddenSource | None = None
    """None for the first block, which starts from the tokens."""

    @classmethod
    def of(cls, data: PackedDataset, source: HiddenSource | None) -> BlockData:
        given = {field.name: getattr(data, field.name) for field in fields(PackedDataset)}
        return cls(**given, source=source)

    def batch(self, indices: np.ndarray | list[int]) -> dict[str, Tensor]:
        rows = np.asarray(indices, dtype=np.int64)
        batch = super().batch(rows) | {ROWS: torch.from_numpy(rows)}
        if self.source is not None:
            batch[HIDDEN] = self.source.read(rows)
        return batch
