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
import re
import shutil
import warnings
from collections.abc import Callable
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
FORMAT_VERSION = 2
FILE_BYTES = 2**32
"""About so many bytes of tensors go into a file, whose content is put together in memory."""

_HIDDEN = ".tmp-"
_NAME = re.compile(r"(?P<kind>step|best)-(?P<step>\d{8,})")


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

    @property
    def step(self) -> int:
        return step_of(self.path)


# --- writing and reading ----------------------------------------------------------------------------------------


def write_checkpoint(
    path: Path, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any], group: Group = SINGLE
) -> Path:
    """Write the folder `path` so that it appears complete or not at all. All ranks of `group` call this.

    Args:
        tensors: kind -> name -> tensor; sharded ones are written by all ranks, others once.
        state: plain JSON values; rank 0's are written.

    Raises:
        UserError: on all ranks, if one cannot write. What was there before is untouched.
    """
    hidden = _hidden(path)
    flat = {f"{kind}/{name}": tensor.detach() for kind, part in tensors.items() for name, tensor in part.items()}
    flat = {key: tensor if isinstance(tensor, DTensor) else tensor.contiguous() for key, tensor in flat.items()}
    _on_main(group, path, lambda: _begin(hidden))
    with group.sync_errors():
        if not hidden.is_dir():
            raise UserError(f"{hidden} is not seen from here: all machines of a run must share the output folder")
    _write_tensors(path, hidden, flat, group)
    files: dict[str, Any] = {}
    for found in group.gather({file.name: _describe(file) for file in sorted(hidden.glob(_files_of(group)))}):
        files.update(found)
    content = {"version": FORMAT_VERSION, "kinds": sorted(tensors), "files": files, "state": state}
    _on_main(group, path, lambda: _complete(hidden, path, content))
    return path


def read_checkpoint(path: Path, parameters: dict[str, Tensor] | None = None, group: Group = SINGLE) -> Checkpoint:
    """Read and verify a checkpoint. All ranks of `group` call this; it may have been written by another number.

    Args:
        parameters: the trained parameters by name. Tensors of their sizes come sharded as they are; all others are
            whole, on the CPU.

    Raises:
        CorruptCheckpoint: on all ranks; a file is missing, truncated or changed, and the message says which.
    """
    content, problem = None, None
    try:
        content = _read_state(path)
        for name in sorted(content["files"])[group.rank :: group.world]:
            _verify(path / name, content["files"][name])
    except CorruptCheckpoint as error:
        problem = str(error)
    problems = [text for text in group.gather(problem) if text is not None]
    if problems:
        raise group.common(CorruptCheckpoint(problems[0]))
    assert content is not None
    tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in content["kinds"]}
    for key, tensor in _read_tensors(path, parameters or {}, group).items():
        kind, _, name = key.partition("/")
        tensors[kind][name] = tensor
    return Checkpoint(path, tensors, content["state"])


def latest_checkpoint(
    directory: Path, report: Callable[[str], None], read: Callable[[Path], Checkpoint] = read_checkpoint
) -> Checkpoint | None:
    """The newest intact `step-` checkpoint; None if there is none at all.

    Damaged ones, for which `read` raises CorruptCheckpoint, are skipped; `report` receives a sentence on each.

    Raises:
        CorruptCheckpoint: there are checkpoints, but none is intact.
    """
    problems = []
    for path in reversed(list_checkpoints(directory, "step")):
        try:
            return read(path)
        except CorruptCheckpoint as error:
            problems.append(str(error))
            report(f"skipping a damaged checkpoint: {error}")
    if problems:
        raise CorruptCheckpoint(
            f"{directory} has no intact checkpoint to continue from:\n  "
            + "\n  ".join(problems)
            + "\nMove the damaged folders away to start this stage from its beginning."
        )
    return None


def _write_tensors(path: Path, hidden: Path, flat: dict[str, Tensor], group: Group) -> None:
    file_of, size = {}, 0
    for key, tensor in flat.items():
        file_of[key] = 1 + size // FILE_BYTES
        size += tensor.numel() * tensor.element_size() // (group.world if isinstance(tensor, DTensor) else 1)
    writer = HuggingFaceStorageWriter(str(hidden), fqn_to_index_mapping=file_of or None, save_distributed=True)
    failures: dict[int, BaseException] = {}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # one process
            dcp.save(flat, storage_writer=writer, process_group=group.control, no_dist=group.world == 1)
    except dcp.api.CheckpointException as error:  # which all ranks raise
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    if failures:
        rank, failure = min(failures.items())
        if not isinstance(failure, Exception):
            raise failure  # an interrupt
        if group.is_main:
            _remove(hidden)
        reason = failure if isinstance(failure, OSError) else RuntimeError(describe_error(failure))
        where = f"rank {rank}: " if group.world > 1 else ""
        raise group.common(UserError(where + _cannot_write_checkpoint(path, reason)))


def _read_tensors(path: Path, parameters: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    reader = HuggingFaceStorageReader(str(path))
    flat: dict[str, Tensor] = {}
    entries: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    for key, entry in entries.items():
        parameter = parameters.get(_parameter_of(key))
        if isinstance(parameter, DTensor) and parameter.shape == entry.size:
            flat[key] = torch.empty_like(parameter, dtype=entry.properties.dtype)
        else:
            flat[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.load(flat, storage_reader=reader, process_group=group.control, no_dist=group.world == 1)
    return flat


def _parameter_of(key: str) -> str:
    """The parameter that a tensor belongs to: optimizers' keys are `optimizer/block/parameter/entry`."""
    kind, _, name = key.partition("/")
    return name.partition("/")[2].rpartition("/")[0] if kind == "optimizer" else name


def _files_of(group: Group) -> str:
    """Pattern for the names of the files that a rank writes."""
    return f"shard-{group.rank + 1:05d}-*"


def _on_main(group: Group, path: Path, action: Callable[[], None]) -> None:
    """Rank 0 writes; if it cannot, all ranks raise the same UserError."""
    with group.sync_errors():
        if group.is_main:
            try:
                action()
            except OSError as error:
                _remove(_hidden(path))
                raise UserError(_cannot_write_checkpoint(path, error)) from error


def _begin(hidden: Path) -> None:
    hidden.parent.mkdir(parents=True, exist_ok=True)
    _remove(hidden)
    hidden.mkdir()


def _complete(hidden: Path, path: Path, content: dict[str, Any]) -> None:
    """Write `state.json`, then give the folder its name; what had that name is replaced."""
    replaced = _hidden(path, "replaced-")
    _write_with_checksum(hidden / STATE_FILE, content)
    _flush(hidden)
    if path.exists():
        _remove(replaced)
        path.rename(replaced)
    try:
        hidden.rename(path)
    except OSError:
        if replaced.exists():
            replaced.rename(path)
        raise
    _flush(path.parent)
    _remove(replaced)


def _read_state(path: Path) -> dict[str, Any]:
    content = read_json(path / STATE_FILE)
    if content.get("version") != FORMAT_VERSION:
        raise CorruptCheckpoint(
            f"{path}: expected checkpoint format {FORMAT_VERSION}, got {content.get('version')};"
            " it was written by another version of lolcats"
        )
    return content


# --- names ------------------------------------------------------------------------------------------------------


def checkpoint_path(directory: Path, kind: str, step: int) -> Path:
    return directory / f"{kind}-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's folder name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"expected a folder named step-00000100 or best-00000100, got {path.name}")
    return int(match["step"])


def list_checkpoints(directory: Path, kind: str) -> list[Path]:
    """Folders of this kind ("step" or "best"), oldest step first; half-written ones do not show."""
    if not directory.is_dir():
        return []
    matches = ((path, _NAME.fullmatch(path.name)) for path in directory.iterdir() if path.is_dir())
    return sorted((path for path, match in matches if match is not None and match["kind"] == kind), key=step_of)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; at no moment is a part of it visible under its name."""
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


def write_json(path: Path, values: dict[str, Any], *, what: str) -> None:
    """Write plain values with a checksum, atomically.

    Args:
        what: the file is, with its article, for the error.

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
        kept = "Its old content, if any, is intact"
        raise UserError(f"{_cannot_write(what, path, error)}. {kept}. Make room, then run it again.") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote.

    Raises:
        CorruptCheckpoint: it is missing or was changed.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CorruptCheckpoint(f"{path} is damaged: it is not valid JSON ({error})") from error
    checksum = content.pop("checksum", None) if isinstance(content, dict) else None
    if checksum is None or checksum != _checksum_of(content):
        raise CorruptCheckpoint(f"{path} is damaged: its checksum does not match its content")
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


def _verify(file: Path, expected: dict[str, Any]) -> None:
    try:
        found = _describe(file)
    except OSError as error:
        raise CorruptCheckpoint(f"{file} cannot be read: {error}") from error
    if found != expected:
        raise CorruptCheckpoint(
            f"{file} is damaged: expected {expected['bytes']} bytes with SHA-256"
            f" {expected['sha256'][:12]}..., got {found['bytes']} with {found['sha256'][:12]}..."
        )


def _flush(path: Path) -> None:
    """fsync a file or folder."""
    if path.is_dir() and os.name == "nt":
        return  # Windows has no fsync of folders
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write_checkpoint(path: Path, error: Exception) -> str:
    """Why the checkpoint `path` could not be written, which one is still there, and what to do."""
    older = list_checkpoints(path.parent, "step")
    kept = f"The previous checkpoint {older[-1]} is intact" if older else "No earlier checkpoint exists"
    return f"{_cannot_write('the checkpoint', path, error)}. {kept}. Make room, then resume with --resume."


def _cannot_write(what: str, path: Path, error: Exception) -> str:
    """Why `path` could not be written, and how much room there is, without a full stop."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    try:
        free = f"{shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free there"
    except OSError:
        free = "the folder cannot be read"
    return f"cannot write {what} {path}: {reason} ({free})"
