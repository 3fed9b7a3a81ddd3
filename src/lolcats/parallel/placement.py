"""Whether the processes of a run divide the frozen weights among them, or hold all of them each."""

from __future__ import annotations

import os

import torch
from torch import nn

from lolcats.config import LinearizeConfig
from lolcats.modeling.loading import load_skeleton
from lolcats.parallel.group import Group

WHOLE_SHARE = 0.25  # of a GPU's memory that whole weights may take; the rest is for activations and their gradients
TRAINED_BYTES = 16  # of a parameter in full finetuning: value, gradient and Adam's two moments, all in float32


def divides_weights(config: LinearizeConfig, group: Group) -> bool:
    """What `parallel.shard` means for this run; all processes call this and get the same answer.

    `auto` divides weights that would take more than a quarter of the smallest memory. Whole weights are several
    times faster for small models: nothing is gathered, and CUDA graphs work. Weights that cannot be read in parts
    (GGUF, 4 bits), or that `data.top_esl` needs whole, are left whole.

    Raises:
        UserError: the model cannot be built; on all processes.
    """
    parallel, model = config.parallel, config.model
    if group.world == 1 or parallel.shard != "auto":
        return group.world > 1 and parallel.shard == "on"
    if model.load_in_4bit or model.gguf_file is not None or config.data.top_esl is not None:
        return False
    if parallel.cpu_offload:
        return True
    with group.main_first():
        skeleton, _ = load_skeleton(model)
    trains_all = config.adjust.enabled and config.adjust.method == "full"
    return held_bytes(skeleton, trains_all) > WHOLE_SHARE * min(group.gather(memory_bytes(group)))


def held_bytes(model: nn.Module, trains_all: bool) -> int:
    """What a process holds for the model's parameters, which may be on the meta device."""
    return sum(p.numel() * (TRAINED_BYTES if trains_all else p.element_size()) for p in model.parameters())


def memory_bytes(group: Group) -> int:
    """Memory of this process's GPU, or its part of the machine's."""
    if group.device is not None and group.device.type == "cuda":
        return torch.cuda.get_device_properties(group.device).total_memory
    here = int(os.environ.get("LOCAL_WORLD_SIZE", group.world))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // here
