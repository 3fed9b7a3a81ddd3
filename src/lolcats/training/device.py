"""Copies to the device, random state, peak memory, recomputed activations, and what to do when memory is exhausted."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from lolcats.config import OptimSection
from lolcats.modeling.softmax import upload

NEEDS_LEAST = {"micro_batch_size": 1, "gradient_checkpointing": True, "xent_factor": 0.0, "cuda_graphs": "off"}
"""Settings of a stage with which it needs least memory."""


def checkpoint_activations(model: Any, preserve_rng_state: bool) -> None:
    """In training, recompute the activations within each layer in the backward pass."""
    # transformers' name for it is gradient_checkpointing_enable until 5.23
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "preserve_rng_state": preserve_rng_state})
    model.enable_input_require_grads()


def keep_activations(model: Any) -> None:
    """Undo `checkpoint_activations`."""
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    disable()
    model.disable_input_require_grads()


def explain_out_of_memory(error: BaseException, stage: str, config: OptimSection, device: torch.device) -> str | None:
    """What to change, with the values in force, if `error` says that memory is exhausted; else None."""
    signs = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
    if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not any(sign in str(error) for sign in signs):
        return None
    changes = [
        f"{stage}.{name}={json.dumps(least)} (now {json.dumps(value)})"
        for name, least in NEEDS_LEAST.items()
        if (value := getattr(config, name, least)) != least
    ]
    return f"out of {device} memory. Less is needed with {', '.join([*changes, 'a lower data.sequence_length'])}."


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The batch on the device, without waiting for the device."""
    return {name: tensor if tensor.is_cuda else upload(tensor, device) for name, tensor in batch.items()}


def random_state(device: torch.device) -> dict[str, str]:
    """State of torch's generators (CPU, and that of a GPU) as hexadecimal text."""
    states = {"cpu": bytes(torch.get_rng_state().tolist()).hex()}
    if device.type == "cuda":
        states["cuda"] = bytes(torch.cuda.get_rng_state(device).tolist()).hex()
    return states


def set_random_state(states: dict[str, str], device: torch.device) -> None:
    """Restore what `random_state` gave."""
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(states["cpu"])), dtype=torch.uint8))
    if device.type == "cuda" and "cuda" in states:
        state = torch.tensor(list(bytes.fromhex(states["cuda"])), dtype=torch.uint8)
        torch.cuda.set_rng_state(state, device)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory allocated at once on a GPU since its counter was reset; else the process's largest
    resident size (0 where the system does not tell)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource  # not on Windows
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
