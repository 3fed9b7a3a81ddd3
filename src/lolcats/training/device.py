"""Copies to the device, random state, peak memory, and what to do when memory is exhausted."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from lolcats.config import OptimSection


def explain_out_of_memory(
    error: BaseException,
    stage: str,
    step: int,
    config: OptimSection,
    sequence_length: int,
    device: torch.device,
) -> str | None:
    """What to lower, with the values in force, if `error` says that memory is exhausted; else None."""
    if not _is_out_of_memory(error):
        return None
    memory = f"{device} memory"
    if device.type == "cuda" and torch.cuda.is_available():
        total_gib = torch.cuda.get_device_properties(device).total_memory / 2**30
        memory = f"{device} memory ({total_gib:.0f} GiB)"
    in_force = [f"micro_batch_size={config.micro_batch_size}"]
    if sequence_length:
        in_force.append(f"sequence_length={sequence_length}")
    remedies = []
    if config.micro_batch_size > 1:
        remedies.append(
            f"lower {stage}.micro_batch_size (a divisor of batch_size={config.batch_size};"
            " gradients accumulate, so the batch stays the same)"
        )
    recompute = getattr(config, "gradient_checkpointing", None)
    if recompute is not None:
        in_force.append(f"gradient_checkpointing={str(recompute).lower()}")
    if recompute is False:
        remedies.append(f"set {stage}.gradient_checkpointing=true")
    if getattr(config, "xent_factor", 0.0) > 0:
        remedies.append(f"set {stage}.xent_factor=0 (attention weights are materialised, for some queries at a time)")
    if device.type == "cuda" and config.cuda_graphs != "off":
        remedies.append(f"set {stage}.cuda_graphs=off")
    remedies.append("lower data.sequence_length")
    return (
        f"stage {stage}, step {step}: out of {memory} with {', '.join(in_force)}."
        f" To need less: {'; or '.join(remedies)}."
    )


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    signs = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
    return any(sign in text for sign in signs)


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The batch on the device, without waiting for the device."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {
        name: tensor if tensor.is_cuda else tensor.pin_memory().to(device, non_blocking=True)
        for name, tensor in batch.items()
    }


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
