"""The processes of one run: torchrun starts them, `open_group` joins them, `Group` lets them act as one.

There are two channels. Tensors of training go through the default process group (NCCL on GPUs, gloo on CPUs);
plain values, decisions and errors through a gloo group of their own, so that an error can be told while a
training collective is broken off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from contextlib import suppress
from datetime import timedelta
from typing import Any
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed

from lolcats.errors import UserError

TIMEOUT_S = 600.0
"""Seconds that a process waits for the others before it gives up."""

_FAILED = "lolcats/failed"
_SIGNS = ("gloo/", "Connection reset by peer", "Connection closed by peer", "Broken pipe", "NCCL")
"""What the messages of broken communication contain; gloo raises a plain RuntimeError."""

T = TypeVar("T")


class Group:
    """The processes ("ranks") of a run, seen from one of them. `SINGLE` is a run of one process.

    Attributes:
        rank: number of this process, from 0. Rank 0 prints, and writes what is written once.
        world: number of processes.
        local_rank: number of this process on its machine.
        device: where it computes; None: the configuration decides (one process).
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        local_rank: int = 0,
        device: torch.device | None = None,
        control: Any = None,
        store: Any = None,
    ) -> None:
        self.rank, self.world, self.local_rank, self.device = rank, world, local_rank, device
        self.control = control
        """The process group for plain values."""
        self._store = store
        self._waits = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    # --- errors ---------------------------------------------------------------------------------------------

    def agree(self, error: Exception | None) -> None:
        """Every rank calls this with its error or None; if any has one, all raise the first rank's.

        Raises:
            UserError: "rank 1: ..." on all ranks. In a run of one process: the error itself.
        """
        if self.world == 1:
            if error is not None:
                raise error
            return
        messages = self.gather(None if error is None else describe_error(error))
        for rank, message in enumerate(messages):
            if message is not None:
                raise self.common(UserError(f"rank {rank}: {message}")) from error

    def common(self, error: UserError) -> UserError:
        """Marks an error that all ranks raise: rank 0 prints it."""
        error.quiet, error.common = not self.is_main, self.world > 1
        return error

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that contains no collective: if it fails on one rank, it fails on all (see `agree`)."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self.agree(failure)

    # --- plain values ---------------------------------------------------------------------------------------

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in the order of ranks, on all ranks."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value, group=self.control)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value."""
        if self.world == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, added in their order: the same on all ranks to the last bit."""
        return [sum(column) for column in zip(*self.gather(list(values)), strict=True)]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.world > 1:
            distributed.barrier(group=self.control)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Rank 0 runs the block before the others do, which then find its files; it may take any time."""
        if self.world == 1:
            yield
            return
        self._waits += 1
        key = f"lolcats/main-first-{self._waits}"
        with self.together():
            if not self.is_main:
                _wait_for(self._store, key)
            try:
                yield
            finally:
                if self.is_main:
                    self._store.set(key, "done")

    # --- tensors --------------------------------------------------------------------------------------------

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """In place: the mean over all ranks, in one transfer per type and device."""
        if self.world == 1:
            return
        for flat, parts in _flattened(tensors):
            distributed.all_reduce(flat)
            flat.div_(self.world)
            torch._foreach_copy_(parts, _split(flat, parts))

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """In place: rank 0's values."""
        if self.world == 1:
            return
        for flat, parts in _flattened(tensors):
            distributed.broadcast(flat, src=0)
            torch._foreach_copy_(parts, _split(flat, parts))

    # --- division of work -----------------------------------------------------------------------------------

    def share(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """This rank's items, each with whether its result counts.

        All ranks get equally many, because sharded layers must be called equally often; what is missing is
        filled up with an item that does not count.
        """
        if not items:
            return []
        own = list(items[self.rank :: self.world])
        missing = -(-len(items) // self.world) - len(own)
        return [(item, True) for item in own] + [(items[0], False)] * missing


SINGLE = Group()
_opened: list[Group] = []


def is_distributed() -> bool:
    """Whether torchrun (or whoever sets its variables) started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main_process() -> bool:
    """Whether this is the process that prints, if there are several; also before `open_group`."""
    return not is_distributed() or int(os.environ.get("RANK", "0")) == 0


@contextmanager
def open_group(device: str = "auto", timeout_s: float = TIMEOUT_S) -> Iterator[Group]:
    """Join the processes that torchrun started; without torchrun, `SINGLE`.

    What a rank raises inside, the others hear: as soon as their own communication fails, they raise the same.
    Inside such a block another one is the same group.

    Args:
        device: as `model.device`; auto and cuda mean the GPU of this process's local rank.

    Raises:
        UserError: torchrun's variables are incomplete, there are more processes than GPUs, the others did not
            come within the timeout, or, inside the block, another rank failed or vanished.
    """
    if not is_distributed():
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
        raise _explained(error, group) from error
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
    return Group(rank, world, local_rank, device, control, store)


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


def _explained(error: Exception, group: Group) -> Exception:
    """What a rank raises at the end: its own failure, or that of the rank that took it down."""
    if isinstance(error, UserError) and error.common:
        return error
    if is_communication_error(error):
        with suppress(Exception):
            if group._store.check([_FAILED]):
                heard = UserError(group._store.get(_FAILED).decode())
                heard.quiet = True
                return heard
        return UserError(
            f"rank {group.rank}: another process of this run vanished or does not answer"
            f" ({_first_line(error)}). It was killed, its machine is gone, or it needs longer than parallel.timeout."
            " Start the same command with --resume: it goes on from the last checkpoint (with another number of"
            " processes, too, unless they are pipelined)"
        )
    message = f"rank {group.rank}: {describe_error(error)}"
    first = message
    with suppress(Exception):
        first = group._store.compare_set(_FAILED, "", message).decode()
    if not isinstance(error, UserError):
        return error
    own = UserError(message)
    own.quiet = first != message and first.partition(": ")[2] == str(error)
    return own


def is_communication_error(error: BaseException) -> bool:
    """Whether `error` says that another process does not answer (and not that this one failed)."""
    if isinstance(error, UserError | torch.OutOfMemoryError):
        return False
    text = str(error)
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _SIGNS)
    )


def describe_error(error: BaseException) -> str:
    """The message; of other exceptions than UserError with their type."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _wait_for(store: Any, key: str) -> None:
    """Until rank 0 has set `key`; however long it takes, as long as the store answers."""
    while True:
        try:
            store.wait([key], timedelta(seconds=60))
            return
        except distributed.DistStoreError:  # not yet; DistNetworkError: rank 0 or the agent is gone
            continue


def _flattened(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Tensors of one type and device, one after another in one."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for parts in kinds.values():
        yield torch.cat([part.flatten() for part in parts]), parts


def _split(flat: Tensor, parts: list[Tensor]) -> list[Tensor]:
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
