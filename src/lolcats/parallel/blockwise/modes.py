"""The way through all blocks of a model, one after another on one device.

Streaming: tokens -> block 0 -> hidden states -> block 1 -> ... Each block is read from the checkpoint when its turn
comes, trained while its outputs are written for the next one, and freed. Two blocks' inputs exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from lolcats.config import LinearizeConfig
from lolcats.parallel.blockwise.jobs import open_finished
from lolcats.parallel.blockwise.transfer import BlockwiseTransfer, open_transfer
from lolcats.parallel.group import Group


def train_in_blocks(
    config: LinearizeConfig,
    folder: Path,
    *,
    resume: bool,
    group: Group,
    console: Console,
    begin: Callable[[BlockwiseTransfer], None],
) -> BlockwiseTransfer:
    """Train all blocks as `config.transfer.block_mode` says, or take those that jobs trained.

    Args:
        folder: for checkpoints and activation caches; used by this stage alone.
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
    with group.main_first():
        opened = open_transfer(config, folder, console, device=group.device)
    begin(opened)
    with group.main_first():
        _stream(opened, resume=resume or not group.is_main)
    return opened


def _stream(opened: BlockwiseTransfer, *, resume: bool) -> None:
    """Train all blocks that are not finished, in order.

    Raises:
        UserError: whatever `train` and the caches refuse; what is finished stays.
    """
    exchange = opened.exchange(opened.folder / "activations")
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
