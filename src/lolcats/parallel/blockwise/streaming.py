"""Blocks one after another on one device.

Tokens -> block 0 -> hidden states -> block 1 -> ...: each block is read from the checkpoint when its turn comes,
trained while its outputs are written for the next one, and given back. Two blocks' inputs exist at a time.
"""

from __future__ import annotations

from lolcats.parallel.blockwise.activation_exchange import ActivationExchange, CacheWriter
from lolcats.parallel.blockwise.layers import LayerBlock
from lolcats.parallel.blockwise.run import SPLITS, BlockwiseTransfer
from lolcats.parallel.blockwise.stage import BlockStage


def stream(run: BlockwiseTransfer, exchange: ActivationExchange, *, resume: bool) -> None:
    """Train all blocks that are not finished, in order.

    Raises:
        UserError: whatever `train` and the caches refuse; what is finished stays.
    """
    unfinished = [block for block in run.blocks if run.finished(block) is None]
    again = _without_inputs(run, exchange, unfinished[0]) if unfinished else []
    needed = {block.index for block in (*again, *unfinished)}
    for block in run.blocks:  # what a killed run could not delete any more
        if block.index not in needed:
            exchange.delete(block)
    if not unfinished:
        return
    exchange.check_space(min(2, len(run.blocks) - 1))
    for block in again:
        run.report(f"{block}: passing the data through it again, because its outputs are gone")
        forward_block(run, exchange, block)
        exchange.delete(block)
    for block in unfinished:
        run.report(f"training {block} of {len(run.blocks)} blocks")
        train_block(run, exchange, block, resume=resume)
        exchange.delete(block)


def train_block(
    run: BlockwiseTransfer, exchange: ActivationExchange, block: LayerBlock, *, resume: bool, write: bool = True
) -> None:
    """Train a block whose inputs are complete.

    Args:
        write: also write the inputs of the next block.
    """
    sources = exchange.caches(block) if block.index else None
    sink = exchange.sink(block) if write else None
    with run.stage(block, sources, sink) as stage:
        run.train(block, stage, resume=resume)
        if sink is not None:
            _complete(run, stage, sink)


def forward_block(run: BlockwiseTransfer, exchange: ActivationExchange, block: LayerBlock) -> None:
    """Write the inputs of the next block without training this one."""
    sources = exchange.caches(block) if block.index else None
    sink = exchange.sink(block)
    assert sink is not None, "nothing follows the last block"
    with run.stage(block, sources, sink) as stage:
        _complete(run, stage, sink)


def _complete(run: BlockwiseTransfer, stage: BlockStage, sink: CacheWriter) -> None:
    """Hand on what training did not come across: an epoch leaves its last, incomplete batch out."""
    sink.flush()
    size = run.config.transfer.micro_batch_size
    for split in SPLITS:
        rows = sink.caches[split].missing()
        for begin in range(0, len(rows), size):
            stage.hand_on(split, rows[begin : begin + size])
    sink.flush()


def _without_inputs(run: BlockwiseTransfer, exchange: ActivationExchange, first: LayerBlock) -> list[LayerBlock]:
    """The blocks before `first` that must run again for its inputs."""
    start = first.index
    while not exchange.is_complete(run.blocks[start]):
        start -= 1
    return run.blocks[start : first.index]
