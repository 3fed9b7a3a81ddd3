"""Checkpoints in safetensors shards, read a tensor or some rows of it at a time."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

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
