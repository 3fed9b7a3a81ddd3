"""Checkpoints on disk: written atomically, verified when read, never pickled.

A checkpoint is a folder `<kind>-<step>` (`step-00000100`, `best-00000100`) of safetensors files and one
`state.json`, which lists size and SHA-256 of every file and carries a checksum of itself. It is built in a
hidden folder beside its destination, flushed to the disk, and renamed: under its final name it is complete.

A run of several processes writes the same kind of folder, with the tensors in the files of
torch.distributed.checkpoint (`sharded_checkpoint.py`). Both are found, verified and removed alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save_file
from torch import Tensor

from lolcats.errors import UserError

STATE_FILE = "state.json"
FORMAT_VERSION = 1
_HIDDEN = ".tmp-"
_NAME = re.compile(r"(?P<kind>step|best)-(?P<step>\d{8,})")


class CorruptCheckpoint(UserError):
    """A checkpoint whose files are missing, truncated or changed."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        path: its folder.
        tensors: file stem ("weights", "optimizer") -> name -> CPU tensor.
        state: the plain values it was written with.
    """

    path: Path
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return step_of(self.path)


def checkpoint_path(directory: Path, kind: str, step: int) -> Path:
    return directory / f"{kind}-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's folder name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"expected a folder named step-00000100 or best-00000100, got {path.name}")
    return int(match["step"])


def write_checkpoint(path: Path, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> Path:
    """Write the folder `path` so that it appears complete or not at all.

    Args:
        tensors: file stem -> name -> tensor (any device; copied to the CPU).
        state: plain JSON values.

    Raises:
        UserError: the disk is full or not writable. What was there before is untouched.
    """
    hidden = hidden_path(path)
    try:
        begin(hidden)
        for stem, group in tensors.items():
            file = hidden / f"{stem}.safetensors"
            # copy=True: safetensors refuses tensors that share memory (tied weights)
            save_file(
                {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in group.items()},
                file,
            )
            flush(file)
        files = {file.name: describe_file(file) for file in sorted(hidden.iterdir())}
        complete(hidden, path, files, state)
    except (OSError, SafetensorError) as error:
        remove_tree(hidden)
        raise UserError(cannot_write(path, error)) from error
    return path


def hidden_path(path: Path) -> Path:
    """Where a checkpoint is built."""
    return path.parent / f"{_HIDDEN}{path.name}"


def begin(hidden: Path) -> None:
    """Make the empty folder in which a checkpoint is built."""
    hidden.parent.mkdir(parents=True, exist_ok=True)
    remove_tree(hidden)
    hidden.mkdir()


def complete(hidden: Path, path: Path, files: dict[str, Any], state: dict[str, Any]) -> None:
    """Write `state.json` into the folder `hidden`, then give it its name; what had that name is replaced.

    Args:
        files: name -> what `describe_file` gave, of the tensors' files.
    """
    replaced = path.parent / f"{_HIDDEN}replaced-{path.name}"
    content = {"version": FORMAT_VERSION, "files": files, "state": state}
    write_text(hidden / STATE_FILE, json.dumps({"checksum": checksum_of(content), **content}, indent=1))
    flush(hidden)
    if path.exists():
        remove_tree(replaced)
        path.rename(replaced)
    try:
        hidden.rename(path)
    except OSError:
        if replaced.exists():
            replaced.rename(path)
        raise
    flush(path.parent)
    remove_tree(replaced)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify a checkpoint.

    Raises:
        CorruptCheckpoint: a file is missing, unreadable, truncated or changed; the message says which.
    """
    content = read_state(path)
    tensors = {}
    for name, expected in content["files"].items():
        file = path / name
        verify(file, expected)
        try:
            # clone: load_file maps the file, which may be removed while the tensors live
            tensors[file.stem] = {key: tensor.clone() for key, tensor in load_file(file).items()}
        except (OSError, SafetensorError) as error:
            raise CorruptCheckpoint(f"{file} cannot be read: {error}") from error
    return Checkpoint(path, tensors, content["state"])


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's "state" and list of "files"; raises CorruptCheckpoint."""
    content = read_checked_json(path / STATE_FILE)
    if content.get("version") != FORMAT_VERSION:
        raise CorruptCheckpoint(
            f"{path}: expected checkpoint format {FORMAT_VERSION}, got {content.get('version')};"
            " it was written by another version of lolcats"
        )
    return content


def verify(file: Path, expected: dict[str, Any]) -> None:
    """Raises CorruptCheckpoint unless `describe_file` gives what is expected."""
    try:
        found = describe_file(file)
    except OSError as error:
        raise CorruptCheckpoint(f"{file} cannot be read: {error}") from error
    if found != expected:
        raise CorruptCheckpoint(
            f"{file} is damaged: expected {expected['bytes']} bytes with SHA-256"
            f" {expected['sha256'][:12]}..., got {found['bytes']} with {found['sha256'][:12]}..."
        )


def list_checkpoints(directory: Path, kind: str) -> list[Path]:
    """Folders of this kind ("step" or "best"), oldest step first; half-written ones do not show."""
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None and match["kind"] == kind and path.is_dir():
            found.append(path)
    return sorted(found, key=step_of)


def latest_checkpoint(
    directory: Path, report: Callable[[str], None], read: Callable[[Path], Checkpoint] = read_checkpoint
) -> Checkpoint | None:
    """The newest intact `step-` checkpoint; None if there is none at all.

    Damaged ones, for which `read` raises CorruptCheckpoint, are passed over; `report` receives a sentence on each.

    Raises:
        CorruptCheckpoint: there are checkpoints, but none is intact.
    """
    problems = []
    for path in reversed(list_checkpoints(directory, "step")):
        try:
            return read(path)
        except CorruptCheckpoint as error:
            problems.append(str(error))
            report(f"passing over a damaged checkpoint: {error}")
    if problems:
        raise CorruptCheckpoint(
            f"{directory} has no intact checkpoint to continue from:\n  "
            + "\n  ".join(problems)
            + "\nMove the damaged folders away to start this stage from its beginning."
        )
    return None


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; at no moment is a part of it visible under its name."""
    hidden = path.parent / f"{_HIDDEN}removed-{path.name}"
    remove_tree(hidden)
    with suppress(OSError):  # if it stays it only takes space, and the next save tries again
        path.rename(hidden)
    remove_tree(hidden)


def remove_unfinished(directory: Path) -> None:
    """Remove what a killed process left half-written."""
    for path in directory.glob(f"{_HIDDEN}*"):
        remove_tree(path)


def clear(directory: Path) -> None:
    """Remove the checkpoints and result of a stage, and nothing else, from `directory` (for --overwrite)."""
    for kind in ("step", "best"):
        for path in list_checkpoints(directory, kind):
            remove_checkpoint(path)
    (directory / "done.json").unlink(missing_ok=True)
    remove_unfinished(directory)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write plain values with a checksum, atomically.

    Raises:
        UserError: the disk is full or not writable; the old file is untouched.
    """
    hidden = path.parent / f"{_HIDDEN}{path.name}"
    try:
        write_text(hidden, json.dumps({"checksum": checksum_of(values), **values}, indent=1))
        hidden.replace(path)
        flush(path.parent)
    except OSError as error:
        remove_tree(hidden)
        raise UserError(cannot_write(path, error)) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote.

    Raises:
        CorruptCheckpoint: it is missing or was changed.
    """
    return read_checked_json(path)


def differences(saved: dict[str, Any], current: dict[str, Any], prefix: str = "") -> list[str]:
    """One line for each key, written `section.key`, whose plain values differ."""
    lines = []
    for key in sorted(set(saved) | set(current)):
        old = saved.get(key)
        new = current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {json.dumps(old)} before, {json.dumps(new)} now")
    return lines


def read_checked_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CorruptCheckpoint(f"{path} is damaged: it is not valid JSON ({error})") from error
    checksum = content.pop("checksum", None) if isinstance(content, dict) else None
    if checksum is None or checksum != checksum_of(content):
        raise CorruptCheckpoint(f"{path} is damaged: its checksum does not match its content")
    return content


def checksum_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def describe_file(file: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def write_text(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    flush(file)


def flush(path: Path) -> None:
    """fsync a file or folder."""
    if path.is_dir() and os.name == "nt":
        return  # Windows has no fsync of folders
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Remove a folder or file if it can be removed; what stays only takes space."""
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def cannot_write(path: Path, error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    try:
        free = f"{shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free there"
    except OSError:
        free = "the folder cannot be read"
    older = list_checkpoints(path.parent, "step")
    kept = f"The previous checkpoint {older[-1]} is intact" if older else "No earlier checkpoint exists"
    return f"cannot write {path}: {reason} ({free}). {kept}. Make room, then go on with --resume."
