"""Hidden states between two blocks: a row [T, hidden] per sequence, in files, checksummed.

The cache of N sequences is two files: `NAME.data`, the rows one after another, and `NAME.rows`, an 8-byte entry per
row: 0, or 2**32 + the CRC-32 of the row. A row is entered after it was written, so that a preempted run resumes where
it was, and every row is verified when it is read.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

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

    Raises:
        UserError: the files are of another size, or cannot be written.
    """

    def __init__(self, path: Path, sequences: np.ndarray, tokens: int, hidden: int, dtype: torch.dtype) -> None:
        self.path, self.sequences, self.dtype = path, sequences, dtype
        self.shape = (len(sequences), tokens, hidden)
        self.row_bytes = tokens * hidden * dtype.itemsize
        self._files: dict[str, Any] = {}
        size = len(sequences)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for suffix, width in ((".data", self.row_bytes), (".rows", 8)):
                self._files[suffix] = _opened(path.with_suffix(suffix), size * width)
        except OSError as error:
            raise UserError(self._no_room(error)) from error
        self._entries = np.fromfile(path.with_suffix(".rows"), dtype=np.uint64)
        self._data: np.ndarray = np.memmap(
            path.with_suffix(".data"), dtype=np.uint8, mode="r", shape=(size, self.row_bytes)
        )

    @staticmethod
    def exists(path: Path) -> bool:
        return path.with_suffix(".rows").is_file() and path.with_suffix(".data").is_file()

    def missing(self) -> np.ndarray:
        """Numbers of the sequences not written yet."""
        return self.sequences[self._entries == 0]

    def write(self, sequences: np.ndarray, hidden_BTD: Tensor) -> None:
        """Keep the rows of those `sequences` [B] that are not there yet.

        Raises:
            UserError: the disk is full. The rows written before stay.
        """
        rows = np.searchsorted(self.sequences, sequences)
        if self._entries[rows].all():
            return
        for row, values_TD in zip(rows, hidden_BTD.detach().cpu(), strict=True):
            if self._entries[row]:
                continue
            content = values_TD.to(self.dtype).contiguous().view(torch.uint8).flatten().numpy()
            entry = np.uint64(_WRITTEN + zlib.crc32(content.data))
            self._write_file(".data", int(row) * self.row_bytes, content.data)
            self._write_file(".rows", int(row) * 8, memoryview(entry.tobytes()))
            self._entries[row] = entry

    def read(self, sequences: np.ndarray) -> Tensor:
        """The rows of `sequences` [B] as a tensor [B, T, hidden].

        Raises:
            UserError: one was never written or has changed since.
        """
        out = np.empty((len(sequences), self.row_bytes), dtype=np.uint8)
        for index, row in enumerate(np.searchsorted(self.sequences, sequences)):
            out[index] = self._data[row]
            entry = int(self._entries[row])
            if entry != _WRITTEN + zlib.crc32(out[index].data):
                problem = "are damaged (their checksum does not match)" if entry else "have not been written"
                raise UserError(
                    f"{self}: the hidden states of sequence {sequences[index]} {problem}; delete {self.path.name}.data"
                    f" and {self.path.name}.rows there and resume: they are made again"
                )
        return torch.from_numpy(out).view(self.dtype).view(len(sequences), *self.shape[1:])

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._data = self._entries = np.empty(0, dtype=np.uint64)

    def __str__(self) -> str:
        return str(self.path.with_suffix(".data"))

    def _write_file(self, suffix: str, offset: int, view: memoryview) -> None:
        # Not through a memory map: there a full disk would end the process with SIGBUS.
        file = self._files[suffix]
        try:
            file.seek(offset)
            while view:
                view = view[file.write(view) :]
        except OSError as error:
            raise UserError(self._no_room(error)) from error

    def _no_room(self, error: OSError) -> str:
        return (
            f"cannot write {self}: {error.strerror or error} (it takes {gib(self.shape[0] * self.row_bytes)}). What was"
            " written before is kept; make room, then resume with --resume"
        )


def delete_cache(path: Path) -> None:
    """Delete a cache's files, the list of rows first: without it the data are not looked at."""
    path.with_suffix(".rows").unlink(missing_ok=True)
    path.with_suffix(".data").unlink(missing_ok=True)


def _opened(file: Path, size: int) -> Any:
    """`file` open for writing, with `size` bytes, zeros if it is new."""
    found = file.stat().st_size if file.exists() else 0
    if found not in (0, size):
        raise UserError(
            f"{file} has {found} bytes, expected {size}; it comes from another run. Delete it, or choose another folder"
        )
    stream = file.open("r+b" if found else "w+b", buffering=0)
    stream.truncate(size)
    return stream


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
