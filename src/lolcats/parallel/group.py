"""The processes of one run, acting as one; `joining.py` brings them together.

There are two channels. Tensors of training go through the default process group (NCCL on GPUs, gloo on CPUs);
plain values, decisions and errors through a gloo group of their own, so that an error can be told while a
training collective is broken off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from lolcats.errors import UserError
from lolcats.parallel.failures import describe_error

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
        self.store = store
        """The key-value store of all ranks, which answers when communication is broken off, too."""
        self._waits = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    # --- errors ---------------------------------------------------------------------------------------------

    def all_agree(self, error: Exception | None) -> None:
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
    def sync_errors(self) -> Iterator[None]:
        """A block that contains no collective: if it fails on one rank, it fails on all (see `agree`)."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self.all_agree(failure)

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
        with self.sync_errors():
            if not self.is_main:
                _wait_for(self.store, key)
            try:
                yield
            finally:
                if self.is_main:
                    self.store.set(key, "done")

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
