"""Checkpoints on disk: written atomically, verified when read, never pickled.

A checkpoint is a folder `<kind>-<step>` (`step-00000100`, `best-00000100`) of safetensors files and one
`state.json`, which lists size and SHA-256 of every file and carries a checksum of itself. It is built in a
hidden folder beside its destination, flushed to the disk, and renamed: under its final name it is complete.

A run of several processes writes the same kind of folder, with the tensors in the files of
torch.distributed.checkpoint (`sharded_checkpoint.py`). Both are found, verified and removed alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lolcats.errors import UserError
from lolcats.training.checkpoint_folders import (
    cannot_write_checkpoint,
    hidden_path,
    list_checkpoints,
    remove_tree,
    step_of,
)
from lolcats.training.durable_files import (
    CorruptCheckpoint,
    describe_file,
    flush,
    read_json,
    verify,
    write_with_checksum,
)

STATE_FILE = "state.json"
FORMAT_VERSION = 1


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
        raise UserError(cannot_write_checkpoint(path, error)) from error
    return path


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
    replaced = hidden_path(path, "replaced-")
    content = {"version": FORMAT_VERSION, "files": files, "state": state}
    write_with_checksum(hidden / STATE_FILE, content)
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
    content = read_json(path / STATE_FILE)
    if content.get("version") != FORMAT_VERSION:
        raise CorruptCheckpoint(
            f"{path}: expected checkpoint format {FORMAT_VERSION}, got {content.get('version')};"
            " it was written by another version of lolcats"
        )
    return content


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
