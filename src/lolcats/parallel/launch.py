"""Joining the processes that torchrun started; without it, a run of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
from torch import distributed

from lolcats.errors import UserError, first_line
from lolcats.parallel.group import SINGLE, Group

LONG = timedelta(days=7)
"""The others may wait so long for what one process does alone; torchrun ends them if it ends."""
_SIGNS = ("gloo/", "Connection reset by peer", "Connection closed by peer", "Broken pipe", "NCCL")
"""What the messages of broken communication contain; gloo raises a plain RuntimeError."""
_opened: list[Group] = []


@contextmanager
def open_group(device: str = "auto", timeout_s: float = 600.0) -> Iterator[Group]:
    """Join the processes that torchrun started; without torchrun, `SINGLE`. A nested call gives the same group.

    Args:
        device: as `model.device`; auto and cuda mean the GPU of this process's local rank.
        timeout_s: how long a collective over tensors waits for the others.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield SINGLE
        return
    if _opened:
        yield _opened[-1]
        return
    group = _join(_device(device), timedelta(seconds=timeout_s))
    _opened.append(group)
    try:
        yield group
    except (RuntimeError, OSError) as error:
        if not isinstance(error, distributed.DistError) and not any(sign in str(error) for sign in _SIGNS):
            raise
        raise UserError(
            f"rank {group.rank}: another process of this run failed, as its own message says, or vanished"
            f" ({first_line(error)}). Start the same command with --resume: it resumes from the"
            " last checkpoint (with another number of processes, too)"
        ) from error
    finally:
        _opened.clear()
        with suppress(Exception):
            distributed.destroy_process_group()


def _join(device: torch.device, timeout: timedelta) -> Group:
    on_gpu = device.type == "cuda"
    try:
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timeout, device_id=device if on_gpu else None
        )
        control = distributed.new_group(backend="gloo", timeout=LONG)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the processes of this run did not meet; were they started by torchrun? {error}") from error
    return Group(distributed.get_rank(), distributed.get_world_size(), device, control)


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(
            f"model.device={name!r}: with several processes, expected auto, cpu or cuda, which is the GPU of each"
            " process's local rank"
        )
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"local rank {local_rank} has no GPU: this machine has {count}. Start at most {count} processes on it"
            " (--nproc-per-node), or set model.device=cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
