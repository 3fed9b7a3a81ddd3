"""Packed sequences of one length, in numpy arrays that may be memory-mapped files; and which of them an update sees."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from lolcats.errors import UserError

GOLDEN_RATIO = (5**0.5 - 1) / 2  # its multiples modulo 1 are spread evenly, however many there are
MOVES = ("position_offset", "position_jumps", "position_share")  # as DataSection and dataset call them
IGNORED = -100  # label value that torch's cross-entropy and transformers leave out of the loss


@dataclass(frozen=True, eq=False)
class PackedDataset:
    """N sequences of T tokens.

    A sequence's first token cannot be predicted and is never a label, so `label_mask.sum()` is the number of terms in
    the loss.
    """

    input_ids: np.ndarray
    """[N, T] int32."""
    label_mask: np.ndarray
    """[N, T] bool: True where the token at this position is to be predicted from those before it."""
    info: dict[str, Any] = field(default_factory=dict)
    """Counts of tokens, labels and dropped parts per source, and the content's fingerprint."""
    position_offset: int = 0
    """The most that a sequence's positions are ahead of its tokens; see `moved_positions`."""
    position_jumps: int = 0
    """Places of a sequence where its positions jump ahead."""
    position_share: float = 1.0
    """Share of the sequences that this is done to; the others' positions are those of their tokens."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def labels(self, indices: np.ndarray | list[int]) -> int:
        """Labels of the sequences of these numbers."""
        return int(self.label_mask[np.asarray(indices)].sum())

    def batch(self, indices: np.ndarray | list[int]) -> dict[str, torch.Tensor]:
        """The sequences of the numbers `indices` [B] as model inputs.

        Returns `input_ids` and `labels`, both [B, T] int64; labels are not shifted (transformers models
        shift them) and are -100 where there is nothing to learn. With a position offset also `rotary_positions`
        [B, T] int64.
        """
        rows = np.asarray(indices)
        ids_BT = torch.from_numpy(self.input_ids[rows].astype(np.int64))
        mask_BT = torch.from_numpy(self.label_mask[rows].astype(np.bool_))
        batch = {"input_ids": ids_BT, "labels": ids_BT.masked_fill(~mask_BT, IGNORED)}
        if not self.position_offset:
            return batch
        moves = self.position_offset, self.position_jumps, self.position_share
        moved_BT = moved_positions(rows, ids_BT.shape[1], *moves)
        return batch | {"rotary_positions": torch.from_numpy(moved_BT)}


def moved_positions(rows_B: np.ndarray, tokens: int, offset: int, jumps: int = 0, share: float = 1.0) -> np.ndarray:
    """[B, T] int64: positions of the sequences of these numbers, the same in every epoch and stage.

    Without jumps a sequence begins anywhere in 0 to `offset`. With jumps its parts do, in order. `share` in (0, 1] of
    the sequences are moved, the others begin at 0 and have no jump.
    """
    columns_T = np.arange(tokens, dtype=np.int64)
    spread_B = rows_B * GOLDEN_RATIO % 1.0 / share  # below 1: moved
    if jumps == 0:
        first_B = np.where(spread_B < 1.0, np.floor(spread_B * (offset + 1)), 0.0).astype(np.int64)
        return first_B[:, None] + columns_T
    moved_BT = np.tile(columns_T, (len(rows_B), 1))
    for index in np.flatnonzero(spread_B < 1.0):
        random = np.random.default_rng(int(rows_B[index]))
        ahead = np.sort(random.integers(0, offset + 1, jumps + 1))
        borders = np.sort(random.choice(np.arange(1, tokens), jumps, replace=False))
        moved_BT[index] += ahead[np.searchsorted(borders, columns_T, side="right")]
    return moved_BT


def fingerprint(*arrays: np.ndarray) -> str:
    """sha256 over types, shapes and bytes."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape};".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def counted(input_ids: np.ndarray, label_mask: np.ndarray, info: dict[str, Any]) -> PackedDataset:
    """A data set whose `info` also holds its counts and its fingerprint."""
    counts = {
        "sequences": len(input_ids),
        "tokens": int(input_ids.size),
        "label_tokens": int(label_mask.sum()),
        "fingerprint": fingerprint(input_ids, label_mask),
    }
    return PackedDataset(input_ids, label_mask, info | counts)


@lru_cache(maxsize=4)  # every update of an epoch asks for its order
def seeded_permutation(size: int, *key: int) -> np.ndarray:
    """[size] int64. NumPy promises never to change RandomState's streams, so old runs stay repeatable."""
    words = [part % 2**32 for part in key]
    generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(words)))
    return generator.permutation(size).astype(np.int64)


class BatchSampler:
    """Shuffles anew in every epoch and leaves out the epoch's last, incomplete batch.

    There is no state to save: `indices(step)` is the same in a resumed run as in an unbroken one.
    """

    def __init__(self, num_sequences: int, batch_size: int, seed: int) -> None:
        if num_sequences < batch_size:
            raise UserError(
                f"the training split has {num_sequences} sequences, fewer than one batch of {batch_size}: "
                f"give more data, or lower batch_size or data.sequence_length"
            )
        self.num_sequences = num_sequences
        self.batch_size = batch_size
        self.seed = seed
        self.steps_per_epoch = num_sequences // batch_size

    def indices(self, step: int) -> np.ndarray:
        """[batch_size] int64: the sequences of update `step`, counted from 0 over all epochs."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = seeded_permutation(self.num_sequences, self.seed, epoch)
        return order[place * self.batch_size : (place + 1) * self.batch_size].copy()
