"""A model whose frozen weights are sharded over the processes with FSDP2 (`torch.distributed.fsdp.fully_shard`).

Every decoder layer, the embeddings and the head are gathered just before they compute and freed afterwards.
Feature maps and window factors (and the LoRA adapters that stage 2 adds later) are replicated: they are a few
thousandths of the model and used all the time. So are embeddings tied to the head, since FSDP cannot gather one
weight in two places.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lolcats.checkpoint.read import BaseCheckpoint, ShardReader, checkpoint_folder
from lolcats.config import LinearizeConfig, ModelSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.modeling.decoder import decoder_layers
from lolcats.modeling.loading import load_skeleton, locate
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.group import Group

REPLICATED_SHARE = 0.25  # of a GPU's memory that replicated weights may take; the rest is for activations
TRAINED_BYTES = 16  # of a parameter in full finetuning: value, gradient and Adam's two moments, all in float32


def shards_weights(config: LinearizeConfig, group: Group) -> bool:
    """Whether this run shards its weights; all processes call this and get the same answer.

    `parallel.shard=auto` shards weights that would take more than a quarter of the smallest memory. Replicated
    weights are several times faster for small models: nothing is gathered, and CUDA graphs work. Weights that
    cannot be read in slices (GGUF, quantised) are replicated.

    Raises:
        UserError: the model cannot be built; on all processes.
    """
    parallel, model = config.parallel, config.model
    if group.world == 1 or parallel.shard != "auto":
        return group.world > 1 and parallel.shard == "on"
    if model.load_in_4bit or model.gguf_file is not None:
        return False
    if parallel.cpu_offload:
        return True
    with group.main_first():
        if locate(model).quantisation is not None:
            return False
        skeleton, _ = load_skeleton(model)
    trains_all = config.adjust.enabled and config.adjust.method == "full"
    return held_bytes(skeleton, trains_all) > REPLICATED_SHARE * min(group.gather(memory_bytes(group)))


def held_bytes(model: nn.Module, trains_all: bool) -> int:
    """Bytes that a process holds for the model's parameters, which may be on the meta device."""
    return sum(p.numel() * (TRAINED_BYTES if trains_all else p.element_size()) for p in model.parameters())


def memory_bytes(group: Group) -> int:
    """Memory of this process's GPU, or its part of the machine's."""
    if group.device is not None and group.device.type == "cuda":
        return torch.cuda.get_device_properties(group.device).total_memory
    here = int(os.environ.get("LOCAL_WORLD_SIZE", group.world))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // here


def load_sharded(
    section: ModelSection,
    attention: AttentionConfig,
    group: Group,
    *,
    cpu_offload: bool = False,
    train_all: bool = False,
) -> tuple[LolcatsForCausalLM, Any]:
    """The converted model and its tokenizer; every process reads from the disk only its shard of each weight.

    Args:
        cpu_offload: keep the shards in CPU memory; they are copied to the GPU when their layer computes.
        train_all: for full finetuning: weights are kept and updated in float32 and computed with in the
            section's type.

    Raises:
        UserError: the model cannot be linearized, or its files cannot be read in slices.
    """
    assert group.device is not None
    with group.main_first():
        base, tokenizer = load_skeleton(section)
        folder = checkpoint_folder(str(base.name_or_path or section.path), section.revision)
    with group.sync_errors():
        base.tie_weights()
        compute_dtype = base.dtype
        if train_all:
            base.float()
        model = convert(base, attention)
        reader = ShardReader(folder)
        saved = [name for name, _ in base.named_buffers() if name in base.state_dict()]
        unread = [name.removeprefix("model.") for name, *_ in _unread(model)]
        sources = BaseCheckpoint(base, folder).sources(saved + unread)
        for name in saved:
            base.get_buffer(name).copy_(reader.slice(sources[name])[...])
        place_replicated(model, group.device)
    shared = _tied(model)
    shard(model, group, cpu_offload=cpu_offload, compute_dtype=compute_dtype if train_all else None)

    def read(name: str, parameter: Tensor) -> Tensor:
        stored = reader.slice(sources[name.removeprefix("model.")])
        if list(stored.get_shape()) != list(parameter.shape):
            raise UserError(
                f"{folder}: {name.removeprefix('model.')} has the shape {stored.get_shape()}, where the model has"
                f" {list(parameter.shape)}; config.json and weights do not belong together"
            )
        if not isinstance(parameter, DTensor):
            return stored[:]
        rows = shard_of(parameter.shape[0], group.rank, group.world)
        return stored[rows] if rows.start < rows.stop else torch.empty(0, *parameter.shape[1:])

    with group.sync_errors():
        fill(model, read, group.device, cpu_offload=cpu_offload)
        reader.close()
        if shared:
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model.eval(), tokenizer


def shard(
    model: LolcatsForCausalLM,
    group: Group,
    *,
    cpu_offload: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Shard a model's weights, which may still be on the meta device, over the processes, in place.

    Feature maps, window factors and tied embeddings stay as they are (`place_replicated`).

    Args:
        compute_dtype: type in which layers compute, if it is not the weights' own; gradients stay float32.
    """
    assert group.device is not None
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(group.device.type, (group.world,)),
        "reshard_after_forward": True,
        "ignored_params": set(replicated(model)),
        "offload_policy": CPUOffloadPolicy(pin_memory=group.device.type == "cuda") if cpu_offload else OffloadPolicy(),
    }
    if compute_dtype is not None:
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(model)[1]:
        fully_shard(layer, **settings)
    if not _tied(model):
        fully_shard(model.get_input_embeddings(), **settings)
        fully_shard(model.get_output_embeddings(), **settings)
    # Stages call the decoder and the head apart from each other, so each of the two is a root of its own.
    fully_shard(model.get_decoder(), **settings)
    stray = [name for name, p in model.named_parameters() if not isinstance(p, DTensor) and p not in replicated(model)]
    if stray:
        raise UserError(
            f"{type(model.model).__name__} cannot be sharded: {stray[0]} is neither in its decoder nor in its head;"
            " set parallel.shard=off"
        )
    model.compute_device = group.device


def fill(
    model: LolcatsForCausalLM,
    make: Callable[[str, Tensor], Tensor],
    device: torch.device,
    *,
    cpu_offload: bool = False,
) -> None:
    """Replace all parameters on the meta device.

    Args:
        make: from full name and parameter to this process's shard of the values (all of them, if it is replicated).
        cpu_offload: sharded weights stay on the CPU.
    """
    for name, module, key, parameter in _unread(model):
        values = make(name, parameter)
        if isinstance(parameter, DTensor):
            values = DTensor.from_local(
                values.to("cpu" if cpu_offload else device, parameter.dtype).contiguous(),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        else:
            values = values.to(device, parameter.dtype)
        module._parameters[key] = nn.Parameter(values, requires_grad=parameter.requires_grad)


def place_replicated(model: LolcatsForCausalLM, device: torch.device) -> None:
    """Initialise feature maps and put them and all buffers on the device that computes."""
    for _, module in model.linear_layers():
        if module.window_factor.is_meta:
            module.to_empty(device=device)
            module.reset_parameters()
        else:
            module.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def replicated(model: LolcatsForCausalLM) -> dict[nn.Parameter, None]:
    """The model's replicated parameters, in order."""
    found = {parameter: None for _, module in model.linear_layers() for parameter in module.parameters()}
    if _tied(model):
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


def shard_of(rows: int, rank: int, world: int) -> slice:
    """The rows that FSDP gives to a rank: equal parts, rounded up; the last ranks may get fewer or none."""
    part = -(-rows // world)
    return slice(min(rank * part, rows), min((rank + 1) * part, rows))


def _tied(model: LolcatsForCausalLM) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _unread(model: LolcatsForCausalLM) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(full name, module, its key, parameter) of the parameters that are still on the meta device."""
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta and ".linear_attention." not in name:
            path, _, key = name.rpartition(".")
            yield name, model.get_submodule(path), key, parameter
