"""Joining the processes that torchrun started; without it, a run of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
from torch import distributed

from lolcats.errors import UserError
from lolcats.parallel.errors import explain
from lolcats.parallel.group import SINGLE, Group

_opened: list[Group] = []


@contextmanager
def open_group(device: str = "auto", timeout_s: float = 600.0) -> Iterator[Group]:
    """Join the processes that torchrun started; without torchrun, `SINGLE`.

    When a rank raises inside the block, the others raise the same as soon as their own communication fails.
    A nested call gives the same group.

    Args:
        device: as `model.device`; auto and cuda mean the GPU of this process's local rank.
        timeout_s: how long a process waits for the others before it gives up.

    Raises:
        UserError: torchrun's variables are incomplete, there are more processes than GPUs, the others did not
            come within the timeout, or, inside the block, another rank failed or vanished.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield SINGLE
        return
    if _opened:
        yield _opened[-1]
        return
    group = _join(device, timeout_s)
    _opened.append(group)
    try:
        yield group
    except Exception as error:
        raise explain(error, group.rank, group.store) from error
    finally:
        _opened.clear()
        with suppress(Exception):
            distributed.destroy_process_group()


def _join(device_name: str, timeout_s: float) -> Group:
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set; start with torchrun, which"
            " sets all of them, or unset WORLD_SIZE to use one process"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    device = _device(device_name, local_rank)
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world = next(iter(distributed.rendezvous("env://", timeout=timeout)))
        store.set_timeout(timeout)
        on_gpu = device.type == "cuda"
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=distributed.PrefixStore("lolcats", store),
            rank=rank,
            world_size=world,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
        control = distributed.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the {os.environ['WORLD_SIZE']} processes of this run did not meet at"
            f" {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {timeout_s:g} s: {error}"
        ) from error
    return Group(rank, world, device, control, store)


def _device(name: str, local_rank: int) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(
            f"model.device={name!r}: with several processes, expected auto, cpu or cuda, which is the GPU of each"
            " process's local rank"
        )
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"local rank {local_rank} has no GPU: this machine has {count}. Start at most {count} processes on it"
            " (--nproc-per-node), or set model.device=cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
