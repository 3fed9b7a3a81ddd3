"""Names of checkpoints in a stage's folder: finding, ordering and removing them.

What is being written or removed has a hidden name, so that whatever shows is complete.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

_HIDDEN = ".tmp-"
_NAME = re.compile(r"(?P<kind>step|best)-(?P<step>\d{8,})")


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
    found = []
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None and match["kind"] == kind and path.is_dir():
            found.append(path)
    return sorted(found, key=step_of)


def hidden_path(path: Path, prefix: str = "") -> Path:
    """A name beside `path` for what shall not be seen: it is being written or removed."""
    return path.parent / f"{_HIDDEN}{prefix}{path.name}"


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; at no moment is a part of it visible under its name."""
    hidden = hidden_path(path, "removed-")
    remove_tree(hidden)
    with suppress(OSError):  # if it stays it only takes space, and the next save tries again
        path.rename(hidden)
    remove_tree(hidden)


def remove_unfinished(directory: Path) -> None:
    """Remove what a killed process left half-written."""
    for path in directory.glob(f"{_HIDDEN}*"):
        remove_tree(path)


def remove_tree(path: Path) -> None:
    """Remove a folder or file if it can be removed; what stays only takes space."""
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def cannot_write_checkpoint(path: Path, error: Exception) -> str:
    """Why the checkpoint `path` could not be written, which one is still there, and what to do."""
    older = list_checkpoints(path.parent, "step")
    kept = f"The previous checkpoint {older[-1]} is intact" if older else "No earlier checkpoint exists"
    return f"{cannot_write('the checkpoint', path, error)}. {kept}. Make room, then go on with --resume."


def cannot_write(what: str, path: Path, error: Exception) -> str:
    """Why `path` could not be written, and how much room there is, without a full stop.

    Args:
        what: it is, with its article.
    """
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    try:
        free = f"{shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free there"
    except OSError:
        free = "the folder cannot be read"
    return f"cannot write {what} {path}: {reason} ({free})"
