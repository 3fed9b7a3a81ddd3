"""What the training loop asks of a stage, and what it counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from lolcats.parallel.group import Group


class Stage(Protocol):
    """What a training stage gives the loop.

    Attributes:
        name: in messages and logs; also of its section of the configuration.
        metric: key of `evaluate()` that selects the best weights; lower is better.
        group: the processes that train together and share the evaluations.
        by_labels: whether a batch's loss is the mean over its labels, or else over its sequences.
    """

    name: str
    metric: str
    group: Group
    by_labels: bool

    def blocks(self) -> list[dict[str, nn.Parameter]]:
        """Blocks with their own optimizer, clipping and schedule: name -> parameter. Names are unique over
        all blocks. One block: joint training."""

    @property
    def lr_factors(self) -> Mapping[str, float]:
        """Factors of the learning rate by parameter name, for those that do not learn at the schedule's own."""

    def micro_step(self, batch: dict[str, Tensor], scale: float) -> dict[str, Any]:
        """Forward and backward pass of one micro-batch, which comes on the CPU.

        Gradients add up in `.grad`, multiplied by `scale` (the micro-batch's part of the batch).

        Returns:
            Scalar tensors, which stay on the device: "loss", the mean loss of this micro-batch without `scale`;
            further ones to be logged; optionally "layer_losses", a mapping by layer, by which a NaN is named.
        """

    def evaluate(self) -> dict[str, Any]:
        """Validation numbers, as plain values: `metric`; optionally "block_metrics", one value per block, for the
        plateau schedules (otherwise `metric` serves all); further ones for the history."""


def weights_of(stage: Stage) -> dict[str, Tensor]:
    """What a stage trains, by name."""
    return {name: parameter.detach() for block in stage.blocks() for name, parameter in block.items()}


def set_weights(stage: Stage, tensors: dict[str, Tensor]) -> None:
    """Copy weights, as `weights_of` gave them, into the parameters in place."""
    for name, weight in weights_of(stage).items():
        weight.copy_(tensors[name])


@dataclass
class TrainState:
    """What a stage has done so far, as a checkpoint keeps it; in the end, its result.

    Attributes:
        steps: optimizer updates.
        tokens: tokens trained on.
        seconds: wall time, evaluations and checkpoints included, summed over resumed runs.
        update_seconds: wall time of the updates alone.
        evaluation_seconds: of the evaluations, and of keeping the best weights.
        peak_memory_bytes: most GPU memory allocated at once; on a CPU the process's largest resident size.
        best_step, best_metric: evaluation with the best weights, which the stage holds in the end; step 0 is before
            training.
        train_sums, train_updates: training scalars of the updates read since the last evaluation, added up.
        history: one dict per evaluation, oldest (step 0) first: "step", "tokens", "seconds", "lr" (one per
            block), "train" (training scalars averaged since the evaluation before) and `evaluate()`'s
            values.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    update_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    peak_memory_bytes: int = 0
    best_step: int = -1
    best_metric: float = math.inf
    train_sums: dict[str, float] = field(default_factory=dict)
    train_updates: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Of the updates alone."""
        return self.tokens / max(self.update_seconds, 1e-9)
