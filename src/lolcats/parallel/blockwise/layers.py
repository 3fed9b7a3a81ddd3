"""How a model's decoder layers are divided into blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerBlock:
    """Consecutive decoder layers that are trained together.

    Attributes:
        index: number of the block, from 0.
        begin, end: its decoder layers, from 0; `end` is not among them. Softmax layers that lie between the
            blocks' linear layers belong to the block after them.
        linear: its linearized layers; the last one is layer `end - 1`.
        is_last: nothing after this block is trained, so its output is not needed.
    """

    index: int
    begin: int
    end: int
    linear: tuple[int, ...]
    is_last: bool

    @property
    def name(self) -> str:
        return f"block-{self.index:03d}"

    def __str__(self) -> str:
        layers = f"layer {self.begin}" if self.end == self.begin + 1 else f"layers {self.begin}-{self.end - 1}"
        return f"block {self.index} ({layers})"


def divide(linear_layers: list[int], block_layers: int | None) -> list[LayerBlock]:
    """Blocks of `block_layers` linearized layers each, fewer in the last; None: one block.

    Layers after the last linearized one are in no block: nothing there is trained.
    """
    indices = sorted(linear_layers)
    size = block_layers or len(indices)
    groups = [indices[start : start + size] for start in range(0, len(indices), size)]
    blocks: list[LayerBlock] = []
    for linear in groups:
        begin = blocks[-1].end if blocks else 0
        blocks.append(LayerBlock(len(blocks), begin, linear[-1] + 1, tuple(linear), linear is groups[-1]))
    return blocks
