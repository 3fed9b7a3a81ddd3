"""Checkpoints of a stage: written atomically, never pickled.

A stage's folder holds `step-<n>/`, its last checkpoint. Tensors are in safetensors files that
torch.distributed.checkpoint writes and reads: each process writes its part, and any number of processes reads them.
`state.json` has the plain values. The folder is built under a hidden name and renamed: under its final name it is
complete. The last checkpoint of a finished stage holds its best weights alone.
"""

from __future__ import annotations

import json
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from lolcats.config import differences
from lolcats.errors import UserError
from lolcats.parallel.group import SINGLE, Group
from lolcats.report import read_optional, write_text

STATE_FILE = "state.json"
FILE_BYTES = 2**32
"""About so many bytes of tensors go into a file, whose content is put together in memory."""

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
        tensors: sharded ones are written by all ranks, others once.
        state: plain JSON values; rank 0's are written.

    Raises:
        UserError: on all ranks, if one cannot write. The checkpoint before is untouched.
    """
    hidden, path, older = directory / ".unfinished", directory / f"step-{step:08d}", list_checkpoints(directory)
    try:
        with group.sync_errors():
            if group.is_main:
                shutil.rmtree(hidden, ignore_errors=True)
                hidden.mkdir(parents=True)
        with group.sync_errors():
            if not hidden.is_dir():
                raise OSError(f"{hidden} is not seen from here: all machines of a run must share the output folder")
        _write_tensors(hidden, tensors, group)
        with group.sync_errors():
            if group.is_main:
                write_text(hidden / STATE_FILE, json.dumps(state, indent=1))
                shutil.rmtree(path, ignore_errors=True)
                hidden.rename(path)
    except (OSError, UserError) as error:
        shutil.rmtree(hidden, ignore_errors=True)
        kept = f"The previous checkpoint {older[-1]} is intact" if older else "No earlier checkpoint exists"
        message = f"cannot write {path}: {error}{_free(path)}. {kept}; resume with --resume."
        raise group.common(UserError(message)) from error
    for old in older if group.is_main else ():
        shutil.rmtree(old, ignore_errors=True)


def read_checkpoint(
    path: Path, parameters: dict[str, Tensor] | None = None, group: Group = SINGLE
) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and plain values. All ranks of `group` call this; it may have been written by another number.

    Args:
        parameters: the trained parameters by name. Tensors of their sizes come sharded as they are; all others are
            whole, on the CPU.
    """
    tensors: Tensors = {}
    try:
        for key, tensor in _read_tensors(path, parameters or {}, group).items():
            kind, _, name = key.partition("/")
            tensors.setdefault(kind, {})[name] = tensor
        return tensors, read_optional(path / STATE_FILE)
    except Exception as error:  # whatever torch and safetensors raise concerns these files
        raise UserError(
            f"{path} is damaged: {error}\nMove {path.parent} away to start this stage from its beginning."
        ) from error


def _write_tensors(folder: Path, tensors: Tensors, group: Group) -> None:
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
        raise min(error.failures.items())[1][0] from None


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


def _free(path: Path) -> str:
    with suppress(OSError):
        return f" ({shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free there)"
    return ""


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
