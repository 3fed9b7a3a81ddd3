"""Files that survive a kill: flushed to the disk when they are written, checked when they are read."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from lolcats.errors import UserError
from lolcats.training.checkpoint_folders import cannot_write, hidden_path, remove_tree


class CorruptCheckpoint(UserError):
    """A checkpoint whose files are missing, truncated or changed."""


def write_json(path: Path, values: dict[str, Any], *, what: str) -> None:
    """Write plain values with a checksum, atomically.

    Args:
        what: the file is, with its article, for the error.

    Raises:
        UserError: the disk is full or not writable; the old file is untouched.
    """
    hidden = hidden_path(path)
    try:
        write_with_checksum(hidden, values)
        hidden.replace(path)
        flush(path.parent)
    except OSError as error:
        remove_tree(hidden)
        kept = "Its old content, if any, is intact"
        raise UserError(f"{cannot_write(what, path, error)}. {kept}. Make room, then run it again.") from error


def write_with_checksum(file: Path, values: dict[str, Any]) -> None:
    """Write plain values so that `read_json` knows them again; not atomically."""
    text = json.dumps({"checksum": _checksum_of(values), **values}, indent=1)
    file.write_text(text, encoding="utf-8")
    flush(file)


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


def describe_file(file: Path) -> dict[str, Any]:
    """Size and SHA-256."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


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


def flush(path: Path) -> None:
    """fsync a file or folder."""
    if path.is_dir() and os.name == "nt":
        return  # Windows has no fsync of folders
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
