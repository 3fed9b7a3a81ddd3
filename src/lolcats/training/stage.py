"""What the training loop asks of a stage and of a data set, and what it reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn


class Stage(Protocol):
    """What a training stage gives the loop."""

    @property
    def name(self) -> str:
        """Name in messages and logs; also of its section of the configuration."""

    @property
    def metric(self) -> str:
        """Key of `evaluate()` that selects the best weights; lower is better."""

    def blocks(self) -> list[dict[str, nn.Parameter]]:
        """Blocks with their own optimizer, clipping and schedule: name -> parameter. Names are unique over
        all blocks. One block: joint training."""

    @property
    def lr_factors(self) -> Mapping[str, float]:
        """Factors of the learning rate by parameter name, for those that do not learn at the schedule's own."""

    def micro_step(self, batch: dict[str, Tensor], scale: float) -> dict[str, Any]:
        """Forward and backward pass of one micro-batch, which comes on the CPU.

        Gradients add up in `.grad`, multiplied by `scale` (micro-batch / batch).

        Returns:
            "loss", the mean loss of this micro-batch without `scale`; further scalars to be logged;
            optionally "layer_losses", a list or a mapping by layer, by which a NaN is named. Tensors stay
            on the device: `.item()` would wait for it.
        """

    def evaluate(self) -> dict[str, Any]:
        """Validation numbers: `metric`; optionally "block_metrics", one value per block, for the plateau
        schedules (otherwise `metric` serves all); further plain values for the history."""

    def state(self) -> dict[str, Tensor]:
        """The trained weights."""

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Copy weights, as `state` gave them (on the CPU), into the parameters in place."""


class TokenBatches(Protocol):
    """What the loop needs of a data set; `lolcats.data.PackedDataset` is one."""

    @property
    def info(self) -> dict[str, Any]:
        """Facts about the data; "fingerprint", if there, identifies their content."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Sequences as tensors [B, T]; "input_ids" among them."""


@dataclass
class TrainResult:
    """What a stage did.

    Attributes:
        steps: optimizer updates.
        tokens: tokens trained on.
        seconds: wall time, evaluations and checkpoints included, summed over resumed runs.
        tokens_per_second: of the updates alone.
        peak_memory_bytes: most GPU memory allocated at once; on a CPU the process's largest resident size.
        best_step, best_metric: evaluation whose weights the stage holds now; step 0 is before training.
        history: one dict per evaluation, oldest (step 0) first: "step", "tokens", "seconds", "lr" (one per
            block), "train" (training scalars averaged since the evaluation before) and `evaluate()`'s
            values.
        stopped_early: ended by `early_stopping`.
    """

    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    peak_memory_bytes: int
    best_step: int
    best_metric: float
    history: list[dict[str, Any]]
    stopped_early: bool
