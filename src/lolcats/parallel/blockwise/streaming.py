"""Blocks one after another on one device.

Tokens -> block 0 -> hidden states -> block 1 -> ...: each block is read from the checkpoint when its turn comes,
trained while its outputs are written for the next one, and given back. Two blocks' inputs exist at a time.
"""

from __future__ import annotations

from lolcats.parallel.blockwise.handover import Handover, SpoolSink
from lolcats.parallel.blockwise.layout import Block
from lolcats.parallel.blockwise.run import SPLITS, BlockRun
from lolcats.parallel.blockwise.stage import BlockStage


def stream(run: BlockRun, handover: Handover, *, resume: bool) -> None:
    """Train all blocks that are not finished, in order.

    Raises:
        UserError: whatever `train` and the spools refuse; what is finished stays.
    """
    unfinished = [block for block in run.blocks if run.finished(block) is None]
    again = _without_inputs(run, handover, unfinished[0]) if unfinished else []
    needed = {block.index for block in (*again, *unfinished)}
    for block in run.blocks:  # what a killed run could not delete any more
        if block.index not in needed:
            handover.delete(block)
    if not unfinished:
        return
    handover.check_space(min(2, len(run.blocks) - 1))
    for block in again:
        run.report(f"{block}: passing the data through it again, because its outputs are gone")
        forward_block(run, handover, block)
        handover.delete(block)
    for block in unfinished:
        run.report(f"training {block} of {len(run.blocks)} blocks")
        train_block(run, handover, block, resume=resume)
        handover.delete(block)


def train_block(run: BlockRun, handover: Handover, block: Block, *, resume: bool, write: bool = True) -> None:
    """Train a block whose inputs are complete.

    Args:
        write: also write the inputs of the next block.
    """
    sources = handover.spools(block) if block.index else None
    sink = handover.sink(block) if write else None
    with run.stage(block, sources, sink) as stage:
        run.train(block, stage, resume=resume)
        if sink is not None:
            _complete(run, stage, sink)


def forward_block(run: BlockRun, handover: Handover, block: Block) -> None:
    """Write the inputs of the next block without training this one."""
    sources = handover.spools(block) if block.index else None
    sink = handover.sink(block)
    assert sink is not None, "nothing follows the last block"
    with run.stage(block, sources, sink) as stage:
        _complete(run, stage, sink)


def _complete(run: BlockRun, stage: BlockStage, sink: SpoolSink) -> None:
    """Hand on what training did not come across: an epoch leaves its last, incomplete batch out."""
    sink.flush()
    size = run.config.transfer.micro_batch_size
    for split in SPLITS:
        rows = sink.spools[split].missing()
        for begin in range(0, len(rows), size):
            stage.hand_on(split, rows[begin : begin + size])
    sink.flush()


def _without_inputs(run: BlockRun, handover: Handover, first: Block) -> list[Block]:
    """The blocks before `first` that must run again for its inputs."""
    start = first.index
    while not handover.is_complete(run.blocks[start]):
        start -= 1
    return run.blocks[start : first.index]
