"""A model whose frozen weights are sharded over the processes with FSDP2 (`torch.distributed.fsdp.fully_shard`).

Every decoder layer, the embeddings and the head are gathered just before they compute and freed afterwards.
Feature maps and window factors (and the LoRA adapters that stage 2 adds later) are replicated: they are a few
thousandths of the model and used all the time. So are embeddings tied to the head, since FSDP cannot gather one
weight in two places.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lolcats.checkpoint.read import BaseCheckpoint, checkpoint_folder, weight_parts
from lolcats.config import LinearizeConfig, ModelSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.modeling.decoder import decoder_layers
from lolcats.modeling.loading import load_skeleton, load_tokenizer, locate
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.group import Group

REPLICATED_SHARE = 0.25  # of a GPU's memory that replicated weights may take; the rest is for activations


def shards_weights(config: LinearizeConfig, group: Group) -> bool:
    """Whether this run shards its weights; all processes call this and get the same answer.

    `parallel.shard=auto` shards weights that would take more than a quarter of the smallest memory. Replicated
    weights are several times faster for small models: nothing is gathered, and CUDA graphs work. Weights in
    4 bits are replicated.
    """
    parallel, model = config.parallel, config.model
    if group.world == 1 or parallel.shard != "auto":
        return group.world > 1 and parallel.shard == "on"
    if model.load_in_4bit:
        return False
    with group.main_first():
        skeleton = load_skeleton(model)
    size = sum(parameter.nbytes for parameter in skeleton.parameters())
    return size > REPLICATED_SHARE * min(group.gather(memory_bytes(group)))


def memory_bytes(group: Group) -> int:
    """Memory of this process's GPU, or its part of the machine's."""
    if group.device is not None and group.device.type == "cuda":
        return torch.cuda.get_device_properties(group.device).total_memory
    here = int(os.environ.get("LOCAL_WORLD_SIZE", group.world))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // here


def load_sharded(section: ModelSection, attention: AttentionConfig, group: Group) -> tuple[LolcatsForCausalLM, Any]:
    """The converted model and its tokenizer; every process holds its shard of each weight, and of one layer all."""
    assert group.device is not None
    with group.main_first():
        base, tokenizer = load_skeleton(section), load_tokenizer(locate(section))
        folder = checkpoint_folder(str(base.name_or_path or section.path), section.revision)
    base.tie_weights()
    settings: dict[str, Any] = {"mesh": init_device_mesh(group.device.type, (group.world,))}
    settings["reshard_after_forward"] = True
    with group.sync_errors():
        model = convert(base, attention)
        for _, maps in model.linear_layers():
            maps.to_empty(device=group.device)
            maps.reset_parameters()
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if not buffer.is_meta:
                    module._buffers[name] = buffer.to(group.device)
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        ends = [] if tied else [model.get_input_embeddings(), model.get_output_embeddings()]
        checkpoint = BaseCheckpoint(base, folder)
        for part in weight_parts(model, checkpoint.tied):
            checkpoint.load([part], group.device)
            module = base.get_submodule(part)
            if tied and module is model.get_input_embeddings():
                model.get_output_embeddings().weight = module.weight
            if module in [*decoder_layers(model)[1], *ends]:
                fully_shard(module, ignored_params=set(replicated(model)), **settings)
        # Stages call the decoder and the head apart from each other, so each of the two is a root of its own.
        fully_shard(model.get_decoder(), ignored_params=set(replicated(model)), **settings)
        whole = replicated(model)
        if stray := [name for name, p in model.named_parameters() if not isinstance(p, DTensor) and p not in whole]:
            raise UserError(
                f"{type(model.model).__name__} cannot be sharded: {stray[0]} is neither in its decoder nor in its head;"
                " set parallel.shard=off"
            )
    return model.eval(), tokenizer


def replicated(model: LolcatsForCausalLM) -> dict[nn.Parameter, None]:
    """The model's replicated parameters, in order."""
    found = {parameter: None for _, module in model.linear_layers() for parameter in module.parameters()}
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        found.update(dict.fromkeys(model.get_input_embeddings().parameters()))
    return found


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


@contextmanager
def gathered(module: nn.Module | None) -> Iterator[None]:
    """Within the block the module's own weights are gathered, for use outside of its forward."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()
