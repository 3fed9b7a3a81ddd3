"""What a run has counted so far, and the result that comes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lolcats.training.stage import TrainResult


@dataclass
class Counters:
    """The plain values that a checkpoint restores.

    Attributes:
        step, tokens, seconds, peak_memory_bytes, best_step, best_metric, history, stopped_early: as in `TrainResult`.
        update_seconds: wall time of the updates alone.
        without_gain: evaluations since the best one.
        train_sums, train_updates: training scalars of the updates read since the last evaluation, added up.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    update_seconds: float = 0.0
    peak_memory_bytes: int = 0
    best_step: int = -1
    best_metric: float = math.inf
    without_gain: int = 0
    stopped_early: bool = False
    train_sums: dict[str, float] = field(default_factory=dict)
    train_updates: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)

    def add_train(self, scalars: Mapping[str, float]) -> None:
        """Count an update's training scalars."""
        for name, value in scalars.items():
            self.train_sums[name] = self.train_sums.get(name, 0.0) + value
        self.train_updates += 1

    def take_train(self) -> dict[str, float]:
        """Training scalars averaged over the updates since this was called last."""
        means = {name: total / self.train_updates for name, total in self.train_sums.items()}
        self.train_sums = {}
        self.train_updates = 0
        return means

    def evaluated(self, metric: float, patience: int | None) -> bool:
        """Compare an evaluation at this step with the best before. Returns whether it is better.

        Args:
            patience: stop after so many evaluations without gain; None: never.
        """
        is_best = metric < self.best_metric
        if is_best:
            self.best_metric = metric
            self.best_step = self.step
            self.without_gain = 0
        else:
            self.without_gain += 1
        self.stopped_early = patience is not None and self.without_gain >= patience
        return is_best

    def result(self) -> TrainResult:
        return TrainResult(
            steps=self.step,
            tokens=self.tokens,
            seconds=self.seconds,
            tokens_per_second=self.tokens / max(self.update_seconds, 1e-9),
            peak_memory_bytes=self.peak_memory_bytes,
            best_step=self.best_step,
            best_metric=self.best_metric,
            history=self.history,
            stopped_early=self.stopped_early,
        )
