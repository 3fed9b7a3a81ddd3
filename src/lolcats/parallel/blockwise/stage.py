"""Attention transfer of one block, as the training loop sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from lolcats.config import TransferSection
from lolcats.modeling.call import AttentionCall
from lolcats.parallel.blockwise.data import ROWS, BlockData
from lolcats.parallel.blockwise.forward import HIDDEN, BlockForward
from lolcats.training.transfer import TransferStage


class HiddenSink(Protocol):
    """Where a block's outputs go: caches, or the process that holds the block after it."""

    def put(self, split: str, rows: np.ndarray, hidden_BTD: Tensor) -> None:
        """Take the outputs [B, T, hidden] of the sequences `rows` [B] of "train" or "validation"."""


class BlockStage(TransferStage):
    """`TransferStage` for the layers of one block, whose output is handed on while it trains.

    Outputs are those of softmax attention: they do not depend on training.

    Args:
        data: "train" and "validation".
        sink: None if nobody needs the outputs.
    """

    def __init__(
        self,
        forward: BlockForward,
        config: TransferSection,
        data: dict[str, BlockData],
        sink: HiddenSink | None,
        *,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.block_forward, self.data, self.sink = forward, data, sink
        super().__init__(forward.partial.model, config, data["validation"], only=forward.block.linear, report=report)
        self._output: Tensor | None = None

    @torch.no_grad()
    def hand_on(self, split: str, rows: np.ndarray) -> None:
        """A forward pass of the sequences `rows` for the outputs alone."""
        assert self.sink is not None
        batch = self.data[split].batch(rows)
        self.sink.put(split, rows, self.block_forward(self._inputs(batch)))

    def _make_decoder(self) -> nn.Module:
        return self.block_forward.decoder

    def _computing(self) -> nn.Module:
        return nn.ModuleList(self.block_forward.layers)

    def _step(self, batch: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        result = super()._step(batch, scale)
        if self.sink is not None:
            self.sink.put("train", batch[ROWS].numpy(), result.pop(HIDDEN))
        return result

    def _validate(self, batch: dict[str, Tensor]) -> dict[int, Tensor]:
        losses = super()._validate(batch)
        if self.sink is not None and self._output is not None:
            self.sink.put("validation", batch[ROWS].numpy(), self._output)
        return losses

    def _inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        unused = ROWS if self.block_forward.block.index == 0 else "input_ids"
        return super()._inputs({name: tensor for name, tensor in batch.items() if name not in (ROWS, unused)})

    def _forward(self, inputs: dict[str, Tensor], call: AttentionCall) -> None:
        self._output = None
        self._output = self.block_forward(inputs, call)

    def _gradient_step(self, inputs: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        result = super()._gradient_step(inputs, scale)
        if self.sink is not None:
            assert self._output is not None
            result[HIDDEN] = self._output
        return result
