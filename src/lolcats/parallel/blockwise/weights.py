"""A linearized model whose base weights are on the meta device, filled part by part from the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from lolcats.checkpoint.read import ShardReader
from lolcats.errors import UserError
from lolcats.modeling.decoder import decoder_layers, embedding_name
from lolcats.modeling.layer import HybridAttention
from lolcats.modeling.model import LolcatsForCausalLM


class PartialModel:
    """A linearized model of which only the parts in use hold weights.

    Feature maps and window factors always do: they are small, and lie on the CPU unless their part is in use.

    Args:
        model: what `lolcats.conversion.convert` made of `lolcats.modeling.loading.load_skeleton`.
        folder: the base model's checkpoint.
        device: where parts are put.
    """

    def __init__(self, model: LolcatsForCausalLM, folder: Path, device: torch.device) -> None:
        self.model, self.folder, self.device = model, folder, device
        maps = [module.to_empty(device="cpu") for _, module in model.linear_layers()]
        for _ in ("attached", "initialised"):  # drawn twice, as in a model with weights
            for module in maps:
                module.reset_parameters()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self._in_use: set[str] = set()
        base: Any = model.model
        # transformers' own rules from names and layouts in checkpoints to those in memory. They are internal,
        # which is why pyproject.toml bounds the version and the tests go through all families.
        self._conversions = get_model_conversion_mapping(base)
        self._shapes = base.state_dict()
        self.tied = self._tied()

    @contextmanager
    def loaded(self, *parts: str) -> Iterator[None]:
        """Within the block, the submodules `parts` of the base model ("model.layers.3") are on the device.

        Raises:
            UserError: a file is missing or damaged, or a tensor is missing or has another shape.
        """
        used = [part for part in parts if part not in self._in_use]
        try:
            self._in_use.update(used)
            self._load(used)
            yield
        finally:
            for part in used:
                self._release(part)
            self._in_use.difference_update(used)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of all the model's weights; a decoder layer at a time is in memory."""
        for part in self._parts():
            with self.loaded(part):
                for name, tensor in self.model.state_dict().items():
                    if name.startswith(f"model.{part}.") and name.removeprefix("model.") not in self.tied:
                        yield name, tensor

    def _parts(self) -> list[str]:
        """Paths in the base model of submodules that together hold all weights: layers one by one, then the rest."""
        path, layers = decoder_layers(self.model)
        parts = [embedding_name(self.model), *(f"{path}.{index}" for index in range(len(layers)))]
        for name, _ in self.model.model.named_parameters(remove_duplicate=False):
            module = name.rpartition(".")[0]
            if name not in self.tied and not any(f"{module}.".startswith(f"{part}.") for part in parts):
                parts.append(module)
        return parts

    def _tied(self) -> set[str]:
        """Names of weights of the base model that are another weight under a second name."""
        base: Any = self.model.model
        tied = dict(base.all_tied_weights_keys)
        with closing(ShardReader(self.folder)) as reader:
            names = {self._target(name): name for name in reader.names()}
            for second, first in list(tied.items()):
                if first in names and second in names:  # tied by the configuration, but perhaps not by the weights
                    both = [reader.slice(names[name])[...] for name in (first, second)]
                    if not torch.equal(*both):
                        del tied[second]
        return set(tied)

    def _load(self, parts: list[str]) -> None:
        base: Any = self.model.model
        prefixes = tuple(f"{part}." for part in parts)
        wanted = {name for name in self._shapes if name.startswith(prefixes) and ".linear_attention." not in name}
        try:
            with closing(ShardReader(self.folder)) as reader:
                slices = {}
                for name in reader.names():
                    if self._target(name).startswith(prefixes):
                        slices[name] = reader.slice(name)
                info, _ = convert_and_load_state_dict_in_model(
                    base,
                    slices,
                    LoadStateDictConfig(
                        device_map={"": self.device},
                        dtype=base.dtype,
                        dtype_plan=base._get_dtype_plan(base.dtype),
                        weight_mapping=self._conversions,  # type: ignore[arg-type]  # a base class of what is declared
                    ),
                )
        except (SafetensorError, OSError) as error:
            raise UserError(f"a file of {self.folder} cannot be read: {error}. Download it again") from error
        self._check(wanted & info.missing_keys, info)
        for part in parts:
            base.get_submodule(part).to(self.device)  # feature maps; all else is there

    def _target(self, name: str) -> str:
        """Where the checkpoint's tensor `name` belongs in the base model; of several places, one."""
        renamings = [entry for entry in self._conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._conversions if isinstance(entry, WeightConverter)]
        prefix = self.model.model.base_model_prefix
        target, _ = rename_source_key(name, renamings, converters, prefix, self._shapes)
        if target not in self._shapes and name in self._shapes:
            return name
        return target

    def _check(self, missing: set[str], info: Any) -> None:
        if info.mismatched_keys:
            name, found, expected = min(info.mismatched_keys)
            raise UserError(
                f"{self.folder}: the tensor {name} has shape {list(found)}, the configuration asks for"
                f" {list(expected)}; the files belong to another model"
            )
        if info.conversion_errors:
            name, error = next(iter(info.conversion_errors.items()))
            raise UserError(f"{self.folder}: the tensors for {name} do not fit together: {error}")
        if missing:
            raise UserError(
                f"{self.folder} has no tensor for {', '.join(sorted(missing)[:5])}"
                f"{' and more' if len(missing) > 5 else ''}; the checkpoint is incomplete or belongs to another model"
            )

    def _release(self, part: str) -> None:
        for module in self.model.model.get_submodule(part).modules():
            if isinstance(module, HybridAttention):
                module.to("cpu")
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
