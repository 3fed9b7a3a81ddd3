"""A sharded model's weights as files want them: whole, one after another, with LoRA merged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.modeling.shards import ShardReader
from lolcats.parallel.group import Group

_BASE = ".base_layer"


def whole_weights(model: LolcatsForCausalLM, group: Group) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors of the model's weights, without adapters, one after another.

    All ranks go through it together; each holds one whole weight at a time. Weights that share a tensor come once.
    """
    unique = {name for name, _ in model.named_parameters()}
    second_names = {name for name, _ in model.named_parameters(remove_duplicate=False)} - unique
    for name, tensor in model.state_dict().items():
        if ".lora_" not in name and name not in second_names:
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def stored_weights(model: LolcatsForCausalLM, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of a quantised model, the base model's own as its checkpoint in `folder` has them.

    Adapters trained on weights in 4 bits are merged into the exact ones: rounded to 4 bits again, their small
    changes would mostly vanish.
    """
    with closing(ShardReader(folder)) as reader:
        for name in reader.names():
            yield f"model.{name}", reader.slice(name)[:].to(model.dtype)
    for name, tensor in model.state_dict().items():
        if ".linear_attention." in name:
            yield name, tensor


class Finish:
    """Makes of a weight what `save_pretrained` would write after PEFT's `merge_and_unload`.

    Args:
        merge_lora: add the adapters' products to the weights.
        dtype: type of the weights; None: as they are. Feature maps stay float32.
    """

    def __init__(self, model: LolcatsForCausalLM, *, merge_lora: bool, dtype: torch.dtype | None) -> None:
        self.merge_lora, self.dtype = merge_lora, dtype
        self.adapted: dict[str, Any] = {
            f"{path}.weight": m for path, m in model.named_modules() if isinstance(m, LoraLayer)
        }

    @torch.no_grad()
    def __call__(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        """The name in the file, and the tensor."""
        name = name.replace(_BASE, "")
        layer = self.adapted.get(name)
        if self.merge_lora and layer is not None:
            tensor = tensor.clone()
            for adapter in layer.active_adapters:
                tensor += layer.get_delta_weight(adapter).to(tensor.device)
        if self.dtype is not None and tensor.is_floating_point() and ".linear_attention." not in name:
            tensor = tensor.to(self.dtype)
        return name, tensor
