"""Which sequences each optimizer update sees: a pure function of seed and update index."""

from __future__ import annotations

import numpy as np

from lolcats.errors import UserError


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
        self._kept: tuple[int, np.ndarray] | None = None  # one epoch's order, only to save time

    def indices(self, step: int) -> np.ndarray:
        """[batch_size] int64: the sequences of update `step`, counted from 0 over all epochs."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._kept is None or self._kept[0] != epoch:
            self._kept = (epoch, seeded_permutation(self.num_sequences, self.seed, epoch))
        order = self._kept[1]
        return order[place * self.batch_size : (place + 1) * self.batch_size].copy()
