"""Hidden states between two blocks: a row [T, hidden] per sequence, in memory-mapped files, checksummed.

The cache of N sequences is two files: `NAME.data`, the rows one after another, and `NAME.rows`, an 8-byte entry per
row: 0, or 2**32 + the CRC-32 of the row. A row is entered after it was written, so that a preempted run resumes where
it was, and every row is verified when it is read.
"""

from __future__ import annotations

import math
import os
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lolcats.errors import UserError

_WRITTEN = 1 << 32


class ActivationCache:
    """Hidden states of N sequences.

    Args:
        path: of the files, without suffix.
        sequences: [N] their numbers in the dataset, ascending.
        tokens, hidden: T and the width of a hidden state.
    """

    def __init__(self, path: Path, sequences: np.ndarray, tokens: int, hidden: int, dtype: torch.dtype) -> None:
        self.path, self.sequences, self.dtype = path, sequences, dtype
        self.shape = (len(sequences), tokens, hidden)
        row_bytes = tokens * hidden * dtype.itemsize
        path.parent.mkdir(parents=True, exist_ok=True)
        self._data = _mapped(path.with_suffix(".data"), np.uint8, len(sequences), row_bytes)
        self._entries = _mapped(path.with_suffix(".rows"), np.uint64, len(sequences))

    @staticmethod
    def exists(path: Path) -> bool:
        return path.with_suffix(".rows").is_file() and path.with_suffix(".data").is_file()

    def missing(self) -> np.ndarray:
        """Numbers of the sequences not written yet."""
        return self.sequences[self._entries == 0]

    def write(self, sequences: np.ndarray, hidden_BTD: Tensor) -> None:
        """Keep the rows of those `sequences` [B] that are not there yet."""
        rows = np.searchsorted(self.sequences, sequences)
        if self._entries[rows].all():
            return
        for row, values_TD in zip(rows, hidden_BTD.detach().cpu(), strict=True):
            if not self._entries[row]:
                self._data[row] = values_TD.to(self.dtype).contiguous().view(torch.uint8).flatten().numpy()
                self._entries[row] = _WRITTEN + zlib.crc32(self._data[row])

    def read(self, sequences: np.ndarray) -> Tensor:
        """The rows of `sequences` [B] as a tensor [B, T, hidden]."""
        rows = np.searchsorted(self.sequences, sequences)
        out = np.asarray(self._data[rows])
        for sequence, content, entry in zip(sequences, out, self._entries[rows], strict=True):
            if int(entry) != _WRITTEN + zlib.crc32(content):
                problem = "are damaged (their checksum does not match)" if entry else "have not been written"
                raise UserError(
                    f"{self.path}.data: the hidden states of sequence {sequence} {problem}; delete"
                    f" {self.path.name}.data and {self.path.name}.rows there and resume: they are made again"
                )
        return torch.from_numpy(out).view(self.dtype).view(len(sequences), *self.shape[1:])


def delete_cache(path: Path) -> None:
    """Delete a cache's files, the list of rows first: without it the data are not looked at."""
    path.with_suffix(".rows").unlink(missing_ok=True)
    path.with_suffix(".data").unlink(missing_ok=True)


def _mapped(file: Path, kind: type[np.generic], *shape: int) -> np.ndarray:
    """`file` as an array, zeros if it is new. Its room is reserved: a full disk would end the process in a write."""
    size = math.prod(shape) * np.dtype(kind).itemsize
    found = file.stat().st_size if file.exists() else 0
    if found not in (0, size):
        raise UserError(
            f"{file} has {found} bytes, expected {size}; it comes from another run. Delete it, or choose another folder"
        )
    try:
        with file.open("ab") as stream:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(stream.fileno(), 0, size)
            stream.truncate(size)
    except OSError as error:
        if not found:
            file.unlink(missing_ok=True)
        raise UserError(
            f"cannot write {file}: {error.strerror or error} (it takes {size / 2**30:.2f} GiB). Make room, then use"
            " --resume"
        ) from error
    return np.memmap(file, kind, "r+", shape=shape)
