"""Checkpoints on disk: written atomically, verified when read, never pickled.

A checkpoint is a folder `<kind>-<step>` (`step-00000100`, `best-00000100`). Tensors are in safetensors files that
torch.distributed.checkpoint writes and reads: each process writes its part, and any number of processes reads them.
`state.json` has the plain values, size and SHA-256 of every file, and a checksum of itself. The folder is built under
a hidden name, flushed to the disk and renamed: under its final name it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from lolcats.errors import UserError
from lolcats.parallel.errors import describe_error
from lolcats.parallel.group import SINGLE, Group

STATE_FILE = "state.json"
FORMAT_VERSION = 3
FILE_BYTES = 2**32
"""About so many bytes of tensors go into a file, whose content is put together in memory."""
_HIDDEN = ".tmp-"


class CorruptCheckpoint(UserError):
    """A checkpoint whose files are missing, truncated or changed."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        path: its folder.
        tensors: kind ("weights", "optimizer") -> name -> tensor.
        state: the plain values it was written with.
    """

    path: Path
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


# --- writing and reading ----------------------------------------------------------------------------------------


def write_checkpoint(
    path: Path, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any], group: Group = SINGLE
) -> Path:
    """Write the folder `path` so that it appears complete or not at all. All ranks of `group` call this.

    Args:
        tensors: kind -> name -> tensor; sharded ones are written by all ranks, others once.
        state: plain JSON values; rank 0's are written.

    Raises:
        UserError: on all ranks, if one cannot write. Checkpoints of other steps are untouched.
    """
    hidden = _hidden(path)
    try:
        with group.sync_errors():
            if group.is_main:
                _remove(hidden)
                hidden.mkdir(parents=True)
        with group.sync_errors():
            if not hidden.is_dir():
                raise OSError(f"{hidden} is not seen from here: all machines of a run must share the output folder")
        _write_tensors(hidden, tensors, group)
        with group.sync_errors():
            own = {file.name: _describe(file) for file in sorted(hidden.glob(f"shard-{group.rank + 1:05d}-*"))}
        files = {name: found for described in group.gather(own) for name, found in described.items()}
        with group.sync_errors():
            if group.is_main:
                content = {"version": FORMAT_VERSION, "kinds": sorted(tensors), "files": files, "state": state}
                _write_with_checksum(hidden / STATE_FILE, content)
                _flush(hidden)
                remove_checkpoint(path)  # of a run that ended after it wrote this
                hidden.rename(path)
                _flush(path.parent)
    except (OSError, UserError) as error:
        if group.is_main:
            _remove(hidden)
        older = list_checkpoints(path.parent, "step")
        kept = f"The previous checkpoint {older[-1]} is intact" if older else "No earlier checkpoint exists"
        raise group.common(UserError(f"{_cannot_write(path, error)}. {kept}; resume with --resume.")) from error
    return path


def read_checkpoint(path: Path, parameters: dict[str, Tensor] | None = None, group: Group = SINGLE) -> Checkpoint:
    """Read and verify a checkpoint. All ranks of `group` call this; it may have been written by another number.

    Args:
        parameters: the trained parameters by name. Tensors of their sizes come sharded as they are; all others are
            whole, on the CPU.

    Raises:
        CorruptCheckpoint: on all ranks; a file is missing, truncated or changed, and the message says which.
    """
    content: dict[str, Any] = {}
    problem = None
    try:
        content = read_json(path / STATE_FILE)
        if content.get("version") != FORMAT_VERSION:
            raise CorruptCheckpoint(
                f"{path}: expected checkpoint format {FORMAT_VERSION}, got {content.get('version')};"
                " it was written by another version of lolcats"
            )
        for name in sorted(content["files"])[group.rank :: group.world]:
            found, expected = _describe(path / name), content["files"][name]
            if found != expected:
                raise CorruptCheckpoint(f"{path / name} is damaged: expected {expected}, got {found}")
    except (CorruptCheckpoint, OSError) as error:
        problem = str(error)
    problems = [text for text in group.gather(problem) if text is not None]
    if problems:
        raise group.common(CorruptCheckpoint(problems[0]))
    tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in content["kinds"]}
    for key, tensor in _read_tensors(path, parameters or {}, group).items():
        kind, _, name = key.partition("/")
        tensors[kind][name] = tensor
    return Checkpoint(path, tensors, content["state"])


def _write_tensors(folder: Path, tensors: dict[str, dict[str, Tensor]], group: Group) -> None:
    flat, file_of, size = {}, {}, 0
    for kind, named in tensors.items():
        for name, tensor in named.items():
            sharded = isinstance(tensor, DTensor)
            key = f"{kind}/{name}"
            flat[key] = tensor.detach() if sharded else tensor.detach().contiguous()
            file_of[key] = 1 + size // FILE_BYTES
            size += tensor.numel() * tensor.element_size() // (group.world if sharded else 1)
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=file_of or None, save_distributed=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # one process
            dcp.save(flat, storage_writer=writer, process_group=group.control, no_dist=group.world == 1)
    except dcp.api.CheckpointException as error:  # which all ranks raise
        rank, (failure, _) = min(error.failures.items())
        if not isinstance(failure, Exception):
            raise failure from None  # an interrupt
        if group.world == 1 and isinstance(failure, OSError):
            raise failure from None
        where = f"rank {rank}: " if group.world > 1 else ""
        raise UserError(where + describe_error(failure)) from failure


def _read_tensors(path: Path, parameters: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    reader = HuggingFaceStorageReader(str(path))
    flat: dict[str, Tensor] = {}
    entries: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    for key, entry in entries.items():
        kind, _, name = key.partition("/")
        if kind == "optimizer":  # whose names are `parameter/entry`
            name = name.rpartition("/")[0]
        parameter = parameters.get(name)
        if isinstance(parameter, DTensor) and parameter.shape == entry.size:
            flat[key] = torch.empty_like(parameter, dtype=entry.properties.dtype)
        else:
            flat[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.load(flat, storage_reader=reader, process_group=group.control, no_dist=group.world == 1)
    return flat


# --- names ------------------------------------------------------------------------------------------------------


def checkpoint_path(directory: Path, kind: str, step: int) -> Path:
    return directory / f"{kind}-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's folder name."""
    return int(path.name.rpartition("-")[2])


def list_checkpoints(directory: Path, kind: str) -> list[Path]:
    """Folders of this kind ("step" or "best"), oldest step first; half-written ones do not show."""
    found = (path for path in directory.glob(f"{kind}-*") if path.is_dir())
    return sorted((path for path in found if path.name.removeprefix(f"{kind}-").isdigit()), key=step_of)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, if it is there; at no moment is a part of it visible under its name."""
    hidden = _hidden(path, "removed-")
    _remove(hidden)
    with suppress(OSError):  # if it stays it only takes space, and the next save tries again
        path.rename(hidden)
    _remove(hidden)


def remove_unfinished(directory: Path) -> None:
    """Remove what a killed process left half-written."""
    for path in directory.glob(f"{_HIDDEN}*"):
        _remove(path)


def _hidden(path: Path, prefix: str = "") -> Path:
    """A name beside `path` for what is being written or removed."""
    return path.parent / f"{_HIDDEN}{prefix}{path.name}"


def _remove(path: Path) -> None:
    """Remove a folder or file if it can be removed; what stays only takes space."""
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


# --- files ------------------------------------------------------------------------------------------------------


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write plain values with a checksum, atomically.

    Raises:
        UserError: the disk is full or not writable; the old file is untouched.
    """
    hidden = _hidden(path)
    try:
        _write_with_checksum(hidden, values)
        hidden.replace(path)
        _flush(path.parent)
    except OSError as error:
        _remove(hidden)
        raise UserError(f"{_cannot_write(path, error)}. Its old content, if any, is intact.") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote.

    Raises:
        CorruptCheckpoint: it is missing or was changed.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("checksum") != _checksum_of(content):
            raise ValueError("its checksum does not match its content")
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptCheckpoint(f"{path} is damaged: {error}") from error
    return content


def _write_with_checksum(file: Path, values: dict[str, Any]) -> None:
    text = json.dumps({"checksum": _checksum_of(values), **values}, indent=1)
    file.write_text(text, encoding="utf-8")
    _flush(file)


def _checksum_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _describe(file: Path) -> dict[str, Any]:
    """Size and SHA-256."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def _flush(path: Path) -> None:
    """fsync a file or folder."""
    if path.is_dir() and os.name == "nt":
        return  # Windows has no fsync of folders
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(path: Path, error: Exception) -> str:
    """Why `path` could not be written, and how much room there is, without a full stop."""
    with suppress(OSError):
        return f"cannot write {path}: {error} ({shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free there)"
    return f"cannot write {path}: {error}"
