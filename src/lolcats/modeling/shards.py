"""Checkpoints in safetensors shards, read and written a tensor at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lolcats.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class ShardReader:
    """The tensors of a checkpoint folder, by name; files are opened when a tensor of theirs is asked for.

    Args:
        folder: with `model.safetensors`, or shards and their index.

    Raises:
        UserError: there are no safetensors, the index is damaged or a file that it names is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        index = folder / INDEX
        if index.is_file():
            self.file_of = _read_index(index)
        elif (folder / SINGLE).is_file():
            self.file_of = dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
        else:
            raise UserError(
                f"{folder} has neither {SINGLE} nor {INDEX}. Only safetensors are read block by block; convert other"
                " checkpoints with transformers' save_pretrained"
            )
        missing = sorted({file for file in self.file_of.values() if not (folder / file).is_file()})
        if missing:
            raise UserError(
                f"{folder} is incomplete: {INDEX} names {', '.join(missing[:5])}"
                f"{' and more' if len(missing) > 5 else ''}, not found there. Download the checkpoint again"
            )

    def names(self) -> list[str]:
        return list(self.file_of)

    def slice(self, name: str) -> Any:
        """The tensor `name`, not read yet: `[...]` reads it.

        Raises:
            UserError: its file is damaged or does not hold it.
        """
        file = self.file_of[name]
        try:
            return self._handle(file).get_slice(name)
        except SafetensorError as error:
            raise UserError(
                f"{self.folder / file} does not hold the tensor {name}, which {INDEX} promises ({error}). Download the"
                " file again"
            ) from error

    def close(self) -> None:
        self._open.clear()
        self._stack.close()

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            try:
                self._open[file] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is damaged: {error}. Download the file again") from error
        return self._open[file]


class ShardWriter:
    """Writes tensors, in the order in which they come, into shards with an index, as `save_pretrained` does.

    Memory holds one shard. The folder is complete after `finish`.

    Args:
        shard_bytes: a shard is closed before it would grow beyond this.
    """

    def __init__(self, folder: Path, shard_bytes: int = 5 * 10**9) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self._tensors: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raises OSError if the disk is full."""
        for name, tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if self._tensors and self._waiting_bytes + size > self.shard_bytes:
                self._flush()
            # a copy: safetensors refuses tensors that share memory, and the caller may free its own
            self._tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
            self._waiting_bytes += size
            self._total_bytes += size

    def finish(self) -> None:
        """Write the last shard and the index."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            os.replace(self._unfinished(0), self.folder / SINGLE)
            return
        weight_map = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            os.replace(self._unfinished(number), self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        content = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

    def _flush(self) -> None:
        if not self._tensors:
            return
        try:
            save_file(self._tensors, self._unfinished(len(self._shards)), metadata={"format": "pt"})
        except SafetensorError as error:  # how the library reports a full disk
            raise OSError(str(error)) from error
        self._shards.append(list(self._tensors))
        self._tensors = {}
        self._waiting_bytes = 0

    def _unfinished(self, number: int) -> Path:
        return self.folder / f"unfinished-{number + 1:05d}.safetensors"


def checkpoint_folder(path: str, revision: str | None) -> Path:
    """The local folder of a checkpoint; that of a hub repository is downloaded if it is not there yet."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(f"cannot download the weights of {path}: {error}") from error


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not an index of safetensors shards ({error}); download it again") from error
