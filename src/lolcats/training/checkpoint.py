"""Checkpoints of a stage: written atomically, never pickled.

A stage's folder holds `step-<n>/`, its last checkpoint. What is trained is the same in all processes: one writes, any
number of processes reads. `tensors.safetensors` has it, `state.json` the plain values. The folder is built under a
hidden name and renamed: under its final name it is complete. The last checkpoint of a finished stage holds its best
weights alone.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lolcats.config import differences
from lolcats.errors import UserError
from lolcats.parallel.group import SINGLE, Group
from lolcats.report import read_optional, write_text

STATE_FILE, TENSORS_FILE = "state.json", "tensors.safetensors"

Tensors = dict[str, dict[str, Tensor]]
"""Kind ("weights", "best", "optimizer") -> name -> tensor."""


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints of a stage, oldest first; all but the last one are about to be removed."""
    return sorted(path for path in directory.glob("step-*") if (path / STATE_FILE).is_file())


def write_checkpoint(
    directory: Path, step: int, tensors: Tensors, state: dict[str, Any], group: Group = SINGLE
) -> None:
    """Write a checkpoint, then remove those before it. All ranks of `group` call this.

    Args:
        tensors, state: rank 0's are written; `state` has plain JSON values.

    Raises:
        UserError: on all ranks, if it cannot be written. The checkpoint before is untouched.
    """
    hidden, path, older = directory / ".unfinished", directory / f"step-{step:08d}", list_checkpoints(directory)
    try:
        with group.sync_errors():
            if group.is_main:
                shutil.rmtree(hidden, ignore_errors=True)
                hidden.mkdir(parents=True)
                flat = {f"{kind}/{name}": tensor for kind, part in tensors.items() for name, tensor in part.items()}
                save_file({key: tensor.detach().contiguous() for key, tensor in flat.items()}, hidden / TENSORS_FILE)
                with (hidden / TENSORS_FILE).open("rb") as stream:
                    os.fsync(stream.fileno())
                write_text(hidden / STATE_FILE, json.dumps(state, indent=1))
                shutil.rmtree(path, ignore_errors=True)
                hidden.rename(path)
        with group.sync_errors():
            if not path.is_dir():
                raise OSError(f"{path} is not seen from here: all machines of a run must share the output folder")
    except (OSError, SafetensorError, UserError) as error:
        shutil.rmtree(hidden, ignore_errors=True)
        kept = f"The previous checkpoint {older[-1]} is intact" if older else "No earlier checkpoint exists"
        with suppress(OSError):
            kept = f"{shutil.disk_usage(directory).free / 2**20:.0f} MiB are free there. {kept}"
        message = f"cannot write {path}: {error}. {kept}; resume with --resume."
        raise group.common(UserError(message)) from error
    for old in older if group.is_main else ():
        shutil.rmtree(old, ignore_errors=True)


def read_checkpoint(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Tensors, on the CPU, and plain values."""
    tensors: Tensors = {}
    try:
        for key, tensor in load_file(path / TENSORS_FILE).items():
            kind, _, name = key.partition("/")
            tensors.setdefault(kind, {})[name] = tensor
        return tensors, read_optional(path / STATE_FILE)
    except (OSError, SafetensorError, UserError) as error:
        raise UserError(
            f"{path} is damaged: {error}\nMove {path.parent} away to start this stage from its beginning."
        ) from error


# --- which run a folder belongs to ------------------------------------------------------------------------------


def finished(directory: Path) -> dict[str, Any] | None:
    """The plain values of the last checkpoint of a stage that has ended."""
    state = read_optional(saved[-1] / STATE_FILE) if (saved := list_checkpoints(directory)) else {}
    return state if state.get("finished") else None


def refuse_other_settings(directory: Path, fingerprint: dict[str, Any]) -> None:
    """Raises UserError if the run of a stage in `directory`, where there is one, has another fingerprint."""
    for path in list_checkpoints(directory)[-1:]:
        refuse_changes(path, read_optional(path / STATE_FILE)["fingerprint"], fingerprint)


def refuse_changes(path: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raises UserError, by name, if settings that decide the result are not those `saved` in `path`."""
    changes = differences(saved, current)
    if changes:
        raise UserError(
            f"{path} comes from a run with other settings, so it cannot be resumed:\n  "
            + "\n  ".join(changes)
            + "\nRestore these settings, or start anew in another folder or with --overwrite."
        )
