"""Checkpoints of a run of several processes: each writes its part, any number of processes reads them.

The tensors are in the files of torch.distributed.checkpoint, which knows the parts of divided weights and of their
optimizer's state; what all processes hold alike is written once. The folder is otherwise that of `checkpoint.py`:
`state.json` lists size and SHA-256 of every file, and the folder gets its name when all processes are done. A run
of one process reads such a folder, and one of several reads the safetensors of a run of one.

The index of torch.distributed.checkpoint (`.metadata`) is a pickle: resume only runs that you trust. Exported models
are safetensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

from lolcats.errors import UserError
from lolcats.parallel.errors import describe_error
from lolcats.parallel.group import SINGLE, Group
from lolcats.parallel.sharding import like_parameter
from lolcats.training import checkpoint
from lolcats.training.checkpoint import Checkpoint
from lolcats.training.checkpoint_folders import cannot_write_checkpoint, hidden_path, remove_tree
from lolcats.training.durable_files import CorruptCheckpoint, describe_file, verify

INDEX_FILE = ".metadata"


def write(path: Path, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any], group: Group) -> Path:
    """As `checkpoint.write_checkpoint`, by all ranks at once; `state` is rank 0's.

    Raises:
        UserError: on all ranks, if one cannot write. What was there before is untouched.
    """
    if group.world == 1:
        return checkpoint.write_checkpoint(path, tensors, state)
    hidden = hidden_path(path)
    flat = {f"{stem}/{name}": tensor.detach() for stem, part in tensors.items() for name, tensor in part.items()}
    _on_main(group, path, lambda: checkpoint.begin(hidden))
    with group.sync_errors():
        if not hidden.is_dir():
            raise UserError(f"{hidden} is not seen from here: all machines of a run must share the output folder")
    files = _write_parts(path, hidden, flat, group)
    _on_main(group, path, lambda: checkpoint.complete(hidden, path, files, state))
    return path


def read(path: Path, parameters: dict[str, Tensor], group: Group = SINGLE) -> Checkpoint:
    """Read and verify a checkpoint of either kind, by all ranks at once.

    Args:
        parameters: the trained parameters by name. Tensors of their sizes come divided as they are.

    Raises:
        CorruptCheckpoint: on all ranks; a file is missing, truncated or changed.
    """
    content, problem = None, None
    try:
        content = checkpoint.read_state(path)
        names = sorted(content["files"])
        for name in names[group.rank :: group.world]:
            verify(path / name, content["files"][name])
    except CorruptCheckpoint as error:
        problem = str(error)
    problems = [text for text in group.gather(problem) if text is not None]
    if problems:
        raise group.common(CorruptCheckpoint(problems[0]))
    assert content is not None
    if INDEX_FILE in content["files"]:
        return Checkpoint(path, _read_parts(path, parameters, group), content["state"])
    loaded = checkpoint.read_checkpoint(path)
    placed = {
        stem: {name: _place(tensor, parameters.get(_parameter_of(stem, name))) for name, tensor in part.items()}
        for stem, part in loaded.tensors.items()
    }
    return Checkpoint(path, placed, loaded.state)


def _write_parts(path: Path, hidden: Path, flat: dict[str, Tensor], group: Group) -> dict[str, Any]:
    """Every rank's part; names and checksums of all files."""
    failures: dict[int, BaseException] = {}
    try:
        dcp.save(flat, storage_writer=dcp.FileSystemWriter(hidden), process_group=group.control)
    except dcp.api.CheckpointException as error:  # which all ranks raise
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    if failures:
        rank, failure = min(failures.items())
        if group.is_main:
            remove_tree(hidden)
        reason = failure if isinstance(failure, OSError) else RuntimeError(describe_error(failure))
        raise group.common(UserError(f"rank {rank}: {cannot_write_checkpoint(path, reason)}"))
    own = {file.name: describe_file(file) for file in hidden.glob(f"__{group.rank}_*")}
    if group.is_main:
        own[INDEX_FILE] = describe_file(hidden / INDEX_FILE)
    return {name: facts for files in group.gather(own) for name, facts in files.items()}


def _on_main(group: Group, path: Path, action: Callable[[], None]) -> None:
    """Rank 0 writes; if it cannot, all ranks raise the same UserError."""
    with group.sync_errors():
        if group.is_main:
            try:
                action()
            except OSError as error:
                remove_tree(hidden_path(path))
                raise UserError(cannot_write_checkpoint(path, error)) from error


def _read_parts(path: Path, parameters: dict[str, Tensor], group: Group) -> dict[str, dict[str, Tensor]]:
    reader = dcp.FileSystemReader(path)
    flat = {}
    entries: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    for key, entry in entries.items():
        stem, _, name = key.partition("/")
        parameter = parameters.get(_parameter_of(stem, name))
        if isinstance(parameter, DTensor) and parameter.shape == entry.size:
            flat[key] = torch.empty_like(parameter, dtype=entry.properties.dtype)
        else:
            flat[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process: so it is
        dcp.load(flat, storage_reader=reader, process_group=group.control, no_dist=group.world == 1)
    tensors: dict[str, dict[str, Tensor]] = {}
    for key, tensor in flat.items():
        stem, _, name = key.partition("/")
        tensors.setdefault(stem, {})[name] = tensor
    return tensors


def _place(tensor: Tensor, parameter: Tensor | None) -> Tensor:
    return tensor if parameter is None else like_parameter(tensor, parameter)


def _parameter_of(stem: str, name: str) -> str:
    """The parameter that an entry belongs to: optimizers' are `block/parameter/entry`."""
    return name.partition("/")[2].rpartition("/")[0] if stem == "optimizer" else name
