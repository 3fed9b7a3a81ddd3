"""The processes of one run ("ranks"), acting as one; `launch.py` joins them.

There are two channels. Tensors of training go through the default process group (NCCL on GPUs, gloo on CPUs);
plain values, decisions and errors through a gloo group of their own, so that an error can be reported while a
training collective is broken off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from lolcats.config import OptimSection
from lolcats.errors import UserError

T = TypeVar("T")
SectionT = TypeVar("SectionT", bound=OptimSection)


@dataclass(eq=False)
class Group:
    """The ranks of a run, seen from one of them. `SINGLE` is a run of one process.

    Attributes:
        rank: number of this process, from 0. Rank 0 prints, and writes what is written once.
        world: number of processes.
        device: where it computes; None: as the configuration says (one process).
        control: the process group for plain values.
    """

    rank: int = 0
    world: int = 1
    device: torch.device | None = None
    control: Any = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    # --- errors ---------------------------------------------------------------------------------------------

    @contextmanager
    def sync_errors(self) -> Iterator[None]:
        """A block without collectives: if it fails on one rank, it fails on all.

        Raises:
            UserError: "rank 1: ..." on all ranks, of the first that failed. In a run of one process: the error itself.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.world == 1:
                raise
            failure = error
        kind = "" if isinstance(failure, UserError) else f"{type(failure).__name__}: "
        messages = self.gather(None if failure is None else f"rank {self.rank}: {kind}{failure}")
        for message in filter(None, messages):
            raise self.common(UserError(message)) from failure

    def common(self, error: UserError) -> UserError:
        """Marks an error that all ranks raise: rank 0 prints it."""
        error.suppress_output = not self.is_main
        return error

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

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Rank 0 runs the block before the others do, which then find its files.

        Raises:
            UserError: on all ranks, if one failed. After a failure of rank 0 the others do not run the block.
        """
        with self.sync_errors():
            if not self.is_main and not self.broadcast(False):
                raise UserError("rank 0 failed")  # its own message is the one that all ranks raise
            done = False
            try:
                yield
                done = True
            finally:
                if self.is_main:
                    with nullcontext() if done else suppress(Exception):  # the others may have left
                        self.broadcast(done)

    # --- tensors --------------------------------------------------------------------------------------------

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """In place: the mean over all ranks."""
        for tensor in tensors if self.world > 1 else ():
            distributed.all_reduce(tensor)
            tensor.div_(self.world)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """In place: rank 0's values."""
        for tensor in tensors if self.world > 1 else ():
            distributed.broadcast(tensor, src=0)

    # --- shares of the work ---------------------------------------------------------------------------------

    def sums(self, items: Sequence[T], measure: Callable[[T], tuple[Tensor, int]]) -> tuple[list[float], int]:
        """Sums over all items, of which each rank measures its share; the same on all ranks to the last bit.

        Args:
            measure: values [K, N] of an item, which are added up over N (in float64, when all are measured), and what
                the item counts in a mean.

        Returns:
            The K sums, and the sum of the counts.
        """
        # Equally many on all ranks, because sharded layers must be called equally often: the first ones once more.
        places = range(self.rank, -(-len(items) // self.world) * self.world, self.world)
        own = [(place, measure(items[place % len(items)])) for place in places]
        parts = [(found.cpu().double().sum(1).tolist(), count) for place, (found, count) in own if place < len(items)]
        gathered = [part for parts in self.gather(parts) for part in parts]
        sums = [math.fsum(column) for column in zip(*(values for values, _ in gathered), strict=True)]
        return sums, sum(count for _, count in gathered)


SINGLE = Group()


def fit_micro_batches(section: SectionT, name: str, group: Group, report: Callable[[str], None]) -> SectionT:
    """The section with micro-batches of which every rank gets equally many; smaller ones if need be.

    Gradients add up to the same batch, so results differ by rounding alone.
    """
    if section.batch_size % group.world:
        raise UserError(
            f"{name}.batch_size={section.batch_size} cannot be shared equally by {group.world} processes; choose a"
            f" multiple of {group.world}, or start fewer processes"
        )
    share = section.batch_size // group.world
    size = next(size for size in range(min(section.micro_batch_size, share), 0, -1) if share % size == 0)
    if size == section.micro_batch_size:
        return section
    report(
        f"{name}.micro_batch_size={size} instead of {section.micro_batch_size}: each of {group.world} processes gets"
        f" {share} sequences of a batch"
    )
    return section.model_copy(update={"micro_batch_size": size})
