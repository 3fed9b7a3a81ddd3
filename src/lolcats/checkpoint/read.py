"""Checkpoints in safetensors shards: tensors by name, or the weights of a base model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from lolcats.errors import UserError
from lolcats.modeling.decoder import decoder_layers, embedding_name
from lolcats.modeling.text_tower import TEXT_NAMES

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class ShardReader:
    """The tensors of a checkpoint folder, by name.

    Attributes:
        file_of: name of a tensor -> name of its file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, index = folder, folder / INDEX
        if index.is_file():
            try:
                self.file_of = {
                    str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()
                }
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{index} is not an index of safetensors ({error}); download it again") from error
        elif (folder / SINGLE).is_file():
            self.file_of = dict.fromkeys(self._opened(SINGLE).keys(), SINGLE)
        else:
            raise UserError(
                f"{folder} has neither {SINGLE} nor {INDEX}. Only safetensors are read block by block; convert other"
                " checkpoints with transformers' save_pretrained"
            )
        if missing := sorted({file for file in self.file_of.values() if not (folder / file).is_file()}):
            raise UserError(
                f"{folder} is incomplete: {INDEX} names {_some(missing)}, not found there. Download it again"
            )

    def slice(self, name: str) -> Any:
        """The tensor `name`, not read yet: `[...]` reads it."""
        file = self.file_of[name]
        try:
            return self._opened(file).get_slice(name)
        except SafetensorError as error:
            raise UserError(
                f"{self.folder / file} does not hold the tensor {name}, which {INDEX} promises ({error}). Download the"
                " file again"
            ) from error

    def _opened(self, file: str) -> Any:
        path = self.folder / file
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged: {error}. Download the file again") from error


class BaseCheckpoint:
    """A base model's weights on disk, read into it by submodules.

    transformers' own rules say which tensors in the files make which weight in memory. They are internal, which is why
    pyproject.toml bounds the version and the tests go through all families.

    Attributes:
        tied: names of weights of the base model that are another weight under a second name.
    """

    def __init__(self, base: Any, folder: Path) -> None:
        self.base, self.folder = base, folder
        self._shapes = {name.replace(".base_layer", ""): x for name, x in base.state_dict().items()}  # not PEFT's names
        self._rules = get_model_conversion_mapping(base, TEXT_NAMES)
        renamings = [entry for entry in self._rules if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._rules if isinstance(entry, WeightConverter)]
        self._text_names = renamings[: len(TEXT_NAMES)]  # they come first
        self._target: dict[str, str] = {}  # name in the files -> in the model; of several places, one
        self._converted: set[str] = set()
        reader = ShardReader(folder)
        for name in reader.file_of:
            target, rule = rename_source_key(name, renamings, converters, base.base_model_prefix, self._shapes)
            self._target[name] = name if target not in self._shapes and name in self._shapes else target
            if rule is not None:
                self._converted.add(name)
        self.tied = self._tied(reader)

    def load(self, parts: Sequence[str], device: torch.device) -> None:
        """Put the weights of the submodules `parts` ("model.layers.3") on the device."""
        prefixes = tuple(f"{part}." for part in parts)
        wanted = {name for name in self._shapes if name.startswith(prefixes) and ".linear_attention." not in name}
        reader = ShardReader(self.folder)
        slices = {name: reader.slice(name) for name, to in self._target.items() if to.startswith(prefixes)}
        how = LoadStateDictConfig(
            device_map={"": device},
            dtype=self.base.dtype,
            dtype_plan=self.base._get_dtype_plan(self.base.dtype),
            weight_mapping=self._rules,  # type: ignore[arg-type]  # a base class of what is declared
        )
        try:
            info, _ = convert_and_load_state_dict_in_model(self.base, slices, how)
        except (SafetensorError, OSError) as error:
            raise UserError(f"a file of {self.folder} cannot be read: {error}. Download it again") from error
        if info.mismatched_keys:
            name, found, expected = min(info.mismatched_keys)
            raise UserError(
                f"{self.folder}: the tensor {name} has shape {list(found)}, the configuration asks for"
                f" {list(expected)}; the files belong to another model"
            )
        if info.conversion_errors:
            name, problem = next(iter(info.conversion_errors.items()))
            raise UserError(f"{self.folder}: the tensors for {name} do not fit together: {problem}")
        if missing := wanted & info.missing_keys:
            raise UserError(
                f"{self.folder} has no tensor for {_some(sorted(missing))}; the checkpoint is incomplete or belongs to"
                " another model"
            )

    def own_names(self) -> dict[str, str]:
        """Tensor in the files -> its name in a folder of the base model alone; without those of other parts."""
        found = {name: to for name, to in self._target.items() if to in self._shapes}
        return found | {name: rename_source_key(name, self._text_names, [])[0] for name in self._converted}

    def _tied(self, reader: ShardReader) -> set[str]:
        names = {to: name for name, to in self._target.items()}

        def differ(first: str, second: str) -> bool:  # tied by the configuration, but perhaps not by the weights
            held = [reader.slice(names[name])[...] for name in (first, second) if name in names]
            return len(held) == 2 and not torch.equal(*held)

        return {second for second, first in self.base.all_tied_weights_keys.items() if not differ(first, second)}


def weight_parts(model: Any, tied: set[str]) -> list[str]:
    """Paths in the base model of submodules that hold all weights but `tied`: layers one by one, then the rest."""
    path, layers = decoder_layers(model)
    parts = [embedding_name(model), *(f"{path}.{index}" for index in range(len(layers)))]
    for name, _ in model.model.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        if name not in tied and not any(f"{module}.".startswith(f"{part}.") for part in parts):
            parts.append(module)
    return parts


def checkpoint_folder(path: str, revision: str | None) -> Path:
    """The local folder of a checkpoint; that of a hub repository is downloaded if it is not there yet."""
    if (folder := Path(path).expanduser()).is_dir():
        return folder
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(f"cannot download the weights of {path}: {error}") from error


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (" and more" if len(names) > 5 else "")
