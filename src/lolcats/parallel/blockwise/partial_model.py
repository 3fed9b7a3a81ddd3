"""A linearized model whose base weights are on the meta device, filled part by part from the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lolcats.checkpoint.read import BaseCheckpoint, checkpoint_folder, weight_parts
from lolcats.config import LinearizeConfig
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.modeling.cache import shares_keys
from lolcats.modeling.decoder import decoder_layers, embedding_name
from lolcats.modeling.layer import HybridAttention
from lolcats.modeling.loading import load_skeleton, load_tokenizer, locate, resolve_device
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.blockwise.layers import LayerBlock


def load_in_parts(config: LinearizeConfig, device: torch.device | None = None) -> tuple[PartialModel, Any]:
    """The converted model without its weights, and its tokenizer."""
    skeleton, tokenizer = load_skeleton(config.model), load_tokenizer(locate(config.model))
    model = convert(skeleton, config.attention)
    folder = checkpoint_folder(str(config.model.path), config.model.revision)
    return PartialModel(model, folder, device or resolve_device(config.model.device)), tokenizer


class PartialModel:
    """A linearized model of which only the parts in use hold weights.

    Feature maps and window factors always do: they are small, and lie on the CPU unless their part is in use.
    """

    def __init__(self, model: LolcatsForCausalLM, folder: Path, device: torch.device) -> None:
        for shares, what in (
            (any(map(shares_keys, model.modules())), "its last layers attend over keys of earlier ones"),
            (getattr(model.config.text_config, "hidden_size_per_layer_input", 0), "each layer has its own embedding"),
        ):
            if shares:
                raise UserError(
                    f"{type(model.model).__name__} cannot be trained block by block: {what}; use"
                    " transfer.block_mode=joint"
                )
        self.model, self.folder, self.device = model, folder, device
        for _, maps in model.linear_layers():
            maps.to_empty(device="cpu")
            maps.reset_parameters()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self.checkpoint = BaseCheckpoint(model.model, folder)

    @contextmanager
    def loaded(self, *parts: str) -> Iterator[None]:
        """Within the block, the submodules `parts` of the base model ("model.layers.3") are on the device."""
        try:
            self.checkpoint.load(parts, self.device)
            for part in parts:
                self.model.model.get_submodule(part).to(self.device)  # feature maps; all else is there
            yield
        finally:
            for part in parts:
                self._release(part)

    def parts_of(self, block: LayerBlock) -> list[str]:
        """Paths in the base model of what a block's forward pass needs, for `loaded`."""
        path, _ = decoder_layers(self.model)
        parts = [f"{path}.{index}" for index in range(block.begin, block.end)]
        return parts if block.index else [*parts, embedding_name(self.model)]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of all the model's weights; a decoder layer at a time is in memory."""
        for part in weight_parts(self.model, self.checkpoint.tied):
            with self.loaded(part):
                for name, tensor in self.model.state_dict().items():
                    if name.startswith(f"model.{part}.") and name.removeprefix("model.") not in self.checkpoint.tied:
                        yield name, tensor

    def _release(self, part: str) -> None:
        for module in self.model.model.get_submodule(part).modules():
            if isinstance(module, HybridAttention):
                module.to("cpu")
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
