"""Blocks side by side: every process holds one and hands hidden states to the next while all of them train.

All processes run the same loop over the same batches in the same order. A process receives a micro-batch's hidden
states from the one before it, trains its layers on them and sends its own output on; nothing touches a disk.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from lolcats.errors import UserError
from lolcats.parallel.blockwise.run import BlockwiseTransfer
from lolcats.parallel.group import Group
from lolcats.training.checkpoint import CorruptCheckpoint, list_checkpoints, read_checkpoint, remove_checkpoint, step_of
from lolcats.training.folder import DONE_FILE

IN_FLIGHT = 2
"""Micro-batches that a process may be ahead of the next one."""


class Received:
    """The hidden states that the process before this one sends.

    Args:
        tokens, hidden: T and the width of a hidden state.
    """

    def __init__(self, group: Group, tokens: int, hidden: int, dtype: torch.dtype) -> None:
        self.group, self.shape, self.dtype = group, (tokens, hidden), dtype

    def read(self, rows: np.ndarray) -> Tensor:
        hidden_BTD = torch.empty(len(rows), *self.shape, dtype=self.dtype, device=self.group.device)
        distributed.recv(hidden_BTD, self.group.rank - 1)
        return hidden_BTD


class Sent:
    """Sends outputs to the next process, while this one goes on."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._in_flight: deque[tuple[Any, Tensor]] = deque()

    def put(self, split: str, rows: np.ndarray, hidden_BTD: Tensor) -> None:
        self._wait(IN_FLIGHT - 1)
        hidden = hidden_BTD.detach().contiguous()
        self._in_flight.append((distributed.isend(hidden, self.group.rank + 1), hidden))

    def flush(self) -> None:
        self._wait(0)

    def _wait(self, left: int) -> None:
        while len(self._in_flight) > left:
            work, _ = self._in_flight.popleft()
            work.wait()


def train_pipelined(run: BlockwiseTransfer, group: Group, *, resume: bool) -> None:
    """Train this process's block; returns when all processes have trained theirs.

    Raises:
        UserError: the processes have different data, or no checkpoint in common to go on from.
    """
    block = run.blocks[group.rank]
    fingerprints = group.gather([data.info.get("fingerprint") for data in run.datasets.values()])
    with group.sync_errors():
        if fingerprints[group.rank] != fingerprints[0]:
            raise UserError("this process has other data than rank 0; do all machines see the same files?")
    if resume:
        _go_back_to_common_step(run, group)
    base: Any = run.partial.model.model
    tokens = run.datasets["train"].input_ids.shape[1]
    source = Received(group, tokens, int(base.config.get_text_config().hidden_size), base.dtype)
    sources = None if block.index == 0 else {"train": source, "validation": source}
    sink = None if block.is_last else Sent(group)
    with run.stage(block, sources, sink) as stage:
        # the last checkpoint is removed when all have the next one: so there always is one in common
        run.train(block, stage, resume=resume, saved=group.barrier)
        if sink is not None:
            sink.flush()
    group.barrier()


def _go_back_to_common_step(run: BlockwiseTransfer, group: Group) -> None:
    """Remove this process's checkpoints after the newest step that all processes have.

    A step that only some have is the one that was being written when the run was killed.
    """
    folder = run.folder / run.blocks[group.rank].name
    own = intact_steps(folder)
    common, ahead = newest_common(group.gather(own))
    with group.sync_errors():
        if common is None and ahead > run.transfer.checkpoint_every:
            raise UserError(
                f"the blocks in {run.folder} have no checkpoint in common to go on from (rank {group.rank}: steps"
                f" {own}); start with the same number of processes as before, or anew with --overwrite"
            )
    if common is None:
        (folder / DONE_FILE).unlink(missing_ok=True)
    for path in list_checkpoints(folder, "step"):
        if common is None or step_of(path) > common:
            remove_checkpoint(path)


def intact_steps(folder: Path) -> list[int]:
    """Steps of the undamaged checkpoints in a block's folder."""
    steps = []
    for path in list_checkpoints(folder, "step"):
        try:
            read_checkpoint(path)
        except CorruptCheckpoint:
            continue
        steps.append(step_of(path))
    return steps


def newest_common(steps: list[list[int]]) -> tuple[int | None, int]:
    """The newest step in all lists (None: there is none), and the newest in any (0: all are empty)."""
    common = set.intersection(*(set(own) for own in steps))
    return max(common, default=None), max((step for own in steps for step in own), default=0)
