"""The ways through all blocks of a model: one after another on one device, or side by side on several.

Streaming: tokens -> block 0 -> hidden states -> block 1 -> ... Each block is read from the checkpoint when its turn
comes, trained while its outputs are written for the next one, and freed. Two blocks' inputs exist at a time.

Pipelined: every process holds one block, and all run the same loop over the same batches in the same order. A process
receives a micro-batch's hidden states from the one before it, trains its layers on them and sends its output on;
nothing touches a disk.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, distributed

from lolcats.config import LinearizeConfig
from lolcats.errors import UserError
from lolcats.parallel.blockwise.jobs import open_finished
from lolcats.parallel.blockwise.layers import LayerBlock
from lolcats.parallel.blockwise.transfer import SPLITS, BlockwiseTransfer, HiddenSource, open_transfer
from lolcats.parallel.group import Group
from lolcats.training.checkpoint import CorruptCheckpoint, list_checkpoints, read_checkpoint, remove_checkpoint, step_of
from lolcats.training.folder import DONE_FILE

IN_FLIGHT = 2
"""Micro-batches that a process may be ahead of the next one."""


def train_in_blocks(
    config: LinearizeConfig,
    folder: Path,
    fingerprint_values: dict[str, Any],
    *,
    resume: bool,
    group: Group,
    console: Console,
    begin: Callable[[BlockwiseTransfer], None],
) -> BlockwiseTransfer:
    """Train all blocks as `config.transfer.block_mode` says, or take those that jobs trained.

    Args:
        folder: for checkpoints and activation caches; used by this stage alone.
        fingerprint_values: plain values that decide the result.
        group: in mode "streaming" its first process trains, and the others wait.
        begin: called by all ranks when blocks and data are known, before anything is written.

    Returns:
        The finished transfer, from which a model is assembled.
    """
    transfer = config.transfer
    if transfer.job_folder is not None and transfer.block_mode == "jobs":
        with group.sync_errors():
            device = str(group.device or config.model.device)
            opened = open_finished(Path(transfer.job_folder), console, config, device=device)
        begin(opened)
        return opened
    pipelined = transfer.block_mode == "pipelined"
    if pipelined and group.world == 1:
        raise UserError("block_mode=pipelined needs several processes: start with torchrun, one process per GPU")
    with group.main_first():
        opened = open_transfer(
            config,
            folder,
            fingerprint_values,
            console,
            device=group.device,
            processes=group.world if pipelined else None,
        )
    begin(opened)
    if pipelined:
        _pipeline(opened, group, resume=resume)
    else:
        with group.main_first():
            _stream(opened, resume=resume or not group.is_main)
    return opened


def _stream(opened: BlockwiseTransfer, *, resume: bool) -> None:
    """Train all blocks that are not finished, in order.

    Raises:
        UserError: whatever `train` and the caches refuse; what is finished stays.
    """
    transfer = opened.transfer
    caches = Path(transfer.activation_cache_folder or opened.folder / "activations")
    exchange = opened.exchange(None if transfer.activation_cache == "memory" else caches)
    unfinished = [block for block in opened.blocks if opened.finished(block) is None]
    first = start = unfinished[0].index if unfinished else len(opened.blocks)
    while unfinished and not exchange.is_complete(opened.blocks[start]):
        start -= 1  # this block must run again for the inputs of the next one
    again = opened.blocks[start:first]
    for block in opened.blocks:  # what a preempted run could not delete
        if block not in (*again, *unfinished):
            exchange.delete(block)
    if not unfinished:
        return
    exchange.check_space(min(2, len(opened.blocks) - 1))
    for block in again:
        opened.console.print(f"{block}: passing the data through it again, because its outputs are gone")
        opened.run_block(block, exchange, train=False)
        exchange.delete(block)
    for block in unfinished:
        opened.console.print(f"training {block} of {len(opened.blocks)} blocks")
        opened.run_block(block, exchange, resume=resume)
        exchange.delete(block)


class Sender:
    """Sends outputs to the next process, while this one computes the next ones."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._in_flight: deque[tuple[Any, Tensor]] = deque()

    def put(self, split: str, sequences: np.ndarray, hidden_BTD: Tensor) -> None:
        self.wait(IN_FLIGHT - 1)
        hidden = hidden_BTD.detach().contiguous()
        self._in_flight.append((distributed.isend(hidden, self.group.rank + 1), hidden))

    def wait(self, left: int = 0) -> None:
        """Until at most `left` micro-batches are on their way."""
        while len(self._in_flight) > left:
            work, _ = self._in_flight.popleft()
            work.wait()


def pipeline_ends(
    opened: BlockwiseTransfer, block: LayerBlock, group: Group
) -> tuple[dict[str, HiddenSource] | None, Sender | None]:
    """Where this process's block gets its inputs, by split, and what sends its outputs on; None at the model's ends."""
    dtype = opened.partial.model.model.dtype

    def receive(sequences: np.ndarray) -> Tensor:
        hidden_BTD = torch.empty(len(sequences), *opened.hidden_shape, dtype=dtype, device=group.device)
        distributed.recv(hidden_BTD, group.rank - 1)
        return hidden_BTD

    sources: dict[str, HiddenSource] | None = None if block.index == 0 else dict.fromkeys(SPLITS, receive)
    return sources, None if block.is_last else Sender(group)


def _pipeline(opened: BlockwiseTransfer, group: Group, *, resume: bool) -> None:
    """Train this process's block; returns when all processes have trained theirs.

    Raises:
        UserError: the processes have different data, or no checkpoint in common to resume from.
    """
    block = opened.blocks[group.rank]
    fingerprints = group.gather([opened.datasets[split].info.get("fingerprint") for split in SPLITS])
    with group.sync_errors():
        if fingerprints[group.rank] != fingerprints[0]:
            raise UserError("this process has other data than rank 0; do all machines see the same files?")
    if resume:
        _return_to_common_step(opened, group)
    sources, sender = pipeline_ends(opened, block, group)
    with opened.stage(block, sources, sender) as (stage, data):
        # The last checkpoint is removed when all have the next one: so there always is one in common. Saved by updates
        # alone, because each process has a clock of its own.
        opened.train(block, stage, data["train"], resume=resume, on_saved=group.barrier, save_after_s=math.inf)
        if sender is not None:
            sender.wait()
    group.barrier()


def _return_to_common_step(opened: BlockwiseTransfer, group: Group) -> None:
    """Remove this process's checkpoints after the newest step that all processes have.

    A step that only some have is the one that was being written when the run was preempted.
    """
    folder = opened.folder / opened.blocks[group.rank].name
    own = []
    for path in list_checkpoints(folder, "step"):
        try:
            read_checkpoint(path)
        except CorruptCheckpoint:
            continue
        own.append(step_of(path))
    steps = group.gather(own)
    common = max(set.intersection(*map(set, steps)), default=None)
    newest = max((step for steps_of_rank in steps for step in steps_of_rank), default=0)
    with group.sync_errors():
        if common is None and newest > opened.transfer.checkpoint_every:
            raise UserError(
                f"the blocks in {opened.folder} have no checkpoint in common to resume from (rank {group.rank}: steps"
                f" {own}); start with the same number of processes as before, or anew with --overwrite"
            )
    if common is None:
        (folder / DONE_FILE).unlink(missing_ok=True)
    for path in list_checkpoints(folder, "step"):
        if common is None or step_of(path) > common:
            remove_checkpoint(path)
