"""Hidden states between two blocks: a row [T, hidden] per sequence, in CPU memory or memory-mapped files, checksummed.

The cache of N sequences is two files: `NAME.data`, the rows one after another, and `NAME.rows`, an 8-byte entry per
row: 0, or 2**32 + the CRC-32 of the row. A row is entered after it was written, so that a preempted run resumes where
it was, and every row is verified when it is read.
"""

from __future__ import annotations

import errno
import os
import shutil
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
        path: of the files, without suffix; None: in memory, lost with the process.
        sequences: [N] their numbers in the dataset, ascending.
        tokens, hidden: T and the width of a hidden state.

    Raises:
        UserError: the files are of another size, or the disk has no room for them.
    """

    def __init__(self, path: Path | None, sequences: np.ndarray, tokens: int, hidden: int, dtype: torch.dtype) -> None:
        self.path, self.sequences, self.dtype = path, sequences, dtype
        self.shape = (len(sequences), tokens, hidden)
        self.row_bytes = tokens * hidden * dtype.itemsize
        self._file: Any = None
        size = len(sequences)
        if path is None:
            self._entries = np.zeros(size, dtype=np.uint64)
            self._data: np.ndarray = np.empty((size, self.row_bytes), dtype=np.uint8)
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _reserve(path.with_suffix(".data"), size * self.row_bytes)
            _reserve(path.with_suffix(".rows"), size * 8)
            self._file = path.with_suffix(".data").open("r+b", buffering=0)
        except OSError as error:
            raise UserError(self._no_room(error)) from error
        self._entries = np.memmap(path.with_suffix(".rows"), dtype=np.uint64, mode="r+", shape=(size,))
        self._data = np.memmap(path.with_suffix(".data"), dtype=np.uint8, mode="r", shape=(size, self.row_bytes))

    @staticmethod
    def exists(path: Path) -> bool:
        return path.with_suffix(".rows").is_file() and path.with_suffix(".data").is_file()

    def missing(self) -> np.ndarray:
        """Numbers of the sequences not written yet."""
        return self.sequences[self._entries == 0]

    def write(self, sequences: np.ndarray, hidden_BTD: Tensor) -> None:
        """Keep the rows of those `sequences` [B] that are not there yet.

        Args:
            hidden_BTD: on the CPU.

        Raises:
            UserError: the disk is full. The rows written before stay.
        """
        for row, values_TD in zip(np.searchsorted(self.sequences, sequences), hidden_BTD, strict=True):
            if self._entries[row]:
                continue
            content = values_TD.to(self.dtype).contiguous().view(torch.uint8).flatten().numpy()
            if self._file is None:
                self._data[row] = content
            else:
                self._write_file(int(row) * self.row_bytes, content)
            self._entries[row] = _WRITTEN + zlib.crc32(content.data)

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
                raise UserError(f"{self}: the hidden states of sequence {sequences[index]} {problem}; {self._remedy()}")
        return torch.from_numpy(out).view(self.dtype).view(len(sequences), *self.shape[1:])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._data = self._entries = np.empty(0, dtype=np.uint64)

    def __str__(self) -> str:
        return "hidden states in memory" if self.path is None else str(self.path.with_suffix(".data"))

    def _write_file(self, offset: int, content: np.ndarray) -> None:
        # Not through the memory map: there a full disk would end the process with SIGBUS.
        try:
            self._file.seek(offset)
            view = content.data
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise UserError(self._no_room(error)) from error

    def _no_room(self, error: OSError) -> str:
        assert self.path is not None
        folder, size = self.path.parent, self.shape[0] * self.row_bytes
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        return (
            f"cannot write {self}: {error.strerror or error} (it takes {_gib(size)}; {_gib(free)} are free in"
            f" {folder}). What was written before is kept; make room, then resume with --resume"
        )

    def _remedy(self) -> str:
        if self.path is None:
            return "start again with --resume"
        return f"delete {self.path.name}.data and {self.path.name}.rows there and resume: they are made again"


def delete_cache(path: Path) -> None:
    """Delete a cache's files, the list of rows first: without it the data are not looked at."""
    path.with_suffix(".rows").unlink(missing_ok=True)
    path.with_suffix(".data").unlink(missing_ok=True)


def check_space(folder: Path, bytes_needed: int, what: str) -> None:
    """Refuse to begin what cannot end.

    Args:
        bytes_needed: in all, caches that are in `folder` already included.

    Raises:
        UserError: `folder` has less room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    needed = bytes_needed - sum(file.stat().st_size for file in folder.glob("*.data"))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{what} need {_gib(needed)} in {folder}, where {_gib(free)} are free. Choose another folder"
            " (transfer.activation_cache_folder), larger blocks (transfer.block_layers), fewer tokens, or keep them in"
            " memory (transfer.activation_cache=memory)"
        )


def _reserve(file: Path, size: int) -> None:
    """Create `file` with `size` bytes of zeros, or check that it has them."""
    if file.exists():
        found = file.stat().st_size
        if found != size:
            raise UserError(
                f"{file} has {found} bytes, expected {size}; it comes from another run. Delete it, or choose another"
                " folder"
            )
        return
    unfinished = file.with_name(f"{file.name}.unfinished")
    try:
        with unfinished.open("wb") as stream:
            if hasattr(os, "posix_fallocate") and size:
                try:
                    os.posix_fallocate(stream.fileno(), 0, size)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                        raise
            stream.truncate(size)
        unfinished.replace(file)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
