"""Hidden states between two blocks: one row per sequence, in CPU memory or in a memory-mapped file, checksummed.

A cache of N sequences is two files: `NAME.data`, the rows one after another, and `NAME.rows`, an 8-byte entry per
row: 0, or 2**32 + the CRC-32 of the row. A row is entered after it was written, so that a killed run goes on
where it was, and every row is verified when it is read.
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
    """Rows [T, hidden] of N sequences.

    Args:
        path: of the files, without suffix; None: in memory, gone with the process.
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
        if path is None:
            self._entries = np.zeros(len(sequences), dtype=np.uint64)
            self._data: np.ndarray = np.empty((len(sequences), self.row_bytes), dtype=np.uint8)
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _reserve(path.with_suffix(".data"), self.bytes)
            _reserve(path.with_suffix(".rows"), len(sequences) * 8)
            self._file = path.with_suffix(".data").open("r+b", buffering=0)
        except OSError as error:
            raise UserError(_no_room(path, self.bytes, error)) from error
        size = len(sequences)
        self._entries = np.memmap(path.with_suffix(".rows"), dtype=np.uint64, mode="r+", shape=(size,))
        self._data = np.memmap(path.with_suffix(".data"), dtype=np.uint8, mode="r", shape=(size, self.row_bytes))

    @staticmethod
    def exists(path: Path) -> bool:
        return path.with_suffix(".rows").is_file() and path.with_suffix(".data").is_file()

    @property
    def bytes(self) -> int:
        return self.shape[0] * self.row_bytes

    def missing(self) -> np.ndarray:
        """Numbers of the sequences not written yet."""
        return self.sequences[self._entries == 0]

    def write(self, rows: np.ndarray, hidden_BTD: Tensor) -> None:
        """Keep those of the sequences `rows` [B] that are not there yet.

        Args:
            hidden_BTD: [B, T, hidden] on the CPU.

        Raises:
            UserError: the disk is full. The rows written before stay.
        """
        for place, values_TD in zip(self._places(rows), hidden_BTD, strict=True):
            if self._entries[place]:
                continue
            content = _bytes(values_TD.to(self.dtype))
            if self._file is None:
                self._data[place] = content
            else:
                self._write_file(int(place) * self.row_bytes, content)
            self._entries[place] = _WRITTEN + zlib.crc32(content.data)

    def read(self, rows: np.ndarray) -> Tensor:
        """The sequences `rows` [B] as a tensor [B, T, hidden].

        Raises:
            UserError: one was never written or has changed since.
        """
        out = np.empty((len(rows), self.row_bytes), dtype=np.uint8)
        for index, place in enumerate(self._places(rows)):
            out[index] = self._data[place]
            entry = int(self._entries[place])
            if entry == 0:
                raise UserError(
                    f"{self}: the hidden states of sequence {rows[index]} have not been written; {self._remedy()}"
                )
            if entry != _WRITTEN + zlib.crc32(out[index].data):
                raise UserError(
                    f"{self}: the hidden states of sequence {rows[index]} are damaged (their checksum does not match);"
                    f" {self._remedy()}"
                )
        return torch.from_numpy(out).view(self.dtype).view(len(rows), *self.shape[1:])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._data = self._entries = np.empty(0, dtype=np.uint64)

    def __str__(self) -> str:
        return "hidden states in memory" if self.path is None else str(self.path.with_suffix(".data"))

    def _places(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.sequences, rows)

    def _write_file(self, offset: int, content: np.ndarray) -> None:
        # Not through the memory map: there a full disk would end the process with SIGBUS.
        try:
            self._file.seek(offset)
            view = content.data
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            assert self.path is not None
            raise UserError(_no_room(self.path, self.bytes, error)) from error

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
        bytes_needed: beside what is in `folder` already.

    Raises:
        UserError: `folder` has less room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < bytes_needed:
        raise UserError(
            f"{what} need {_gib(bytes_needed)} in {folder}, where {_gib(free)} are free. Choose another folder"
            " (transfer.activation_cache_folder), larger blocks (transfer.block_layers), fewer tokens, or keep them in"
            " memory (transfer.activation_cache=memory)"
        )


def used_bytes(folder: Path) -> int:
    """Bytes of the caches in `folder`."""
    return sum(file.stat().st_size for file in folder.glob("*.data"))


def _bytes(values: Tensor) -> np.ndarray:
    return values.contiguous().view(torch.uint8).flatten().numpy()


def _reserve(file: Path, size: int) -> None:
    """Create `file` with `size` bytes of zeros, or check that it has them."""
    if file.exists() and file.stat().st_size != size:
        raise UserError(
            f"{file} has {file.stat().st_size} bytes, expected {size}; it comes from another run. Delete it, or choose"
            " another folder"
        )
    if file.exists():
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


def _no_room(path: Path, size: int, error: OSError) -> str:
    free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
    return (
        f"cannot write {path.with_suffix('.data')}: {error.strerror or error} (it takes {_gib(size)}; {_gib(free)} are"
        f" free in {path.parent}). What was written before is kept; make room, then go on with --resume"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
