"""Training metrics: on their way from the device to the host, and what a run has counted so far.

Reading a number from a GPU waits for all its queued work. So the numbers of several updates are kept on the device
and read together, and a NaN is noticed then: before anything that was trained with it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lolcats.errors import UserError
from lolcats.parallel.group import SINGLE, Group
from lolcats.training.stage import TrainResult


class TrainingDiverged(UserError):
    """A loss, gradient, weight or validation metric is NaN or infinite.

    Attributes:
        stage: name of the stage.
        step: update in which it appeared, counted from 1 (0: before training).
        what: the quantity, with its layer or parameter where known.
        rank: the process in which it appeared, if there are several and one alone had it.
    """

    def __init__(self, stage: str, step: int, what: str, value: float, advice: str, rank: int | None = None):
        where = "" if rank is None else f"rank {rank}: "
        super().__init__(f"{where}stage {stage}, step {step}: {what} is {value}. {advice}")
        self.stage, self.step, self.what, self.rank = stage, step, what, rank


class NonFinite(Exception):
    """Internal: found by `MetricBuffer.read`; the loop turns it into TrainingDiverged."""

    def __init__(self, step: int, what: str, value: float, rank: int | None = None):
        super().__init__(step, what, value, rank)
        self.step, self.what, self.value, self.rank = step, what, value, rank


@dataclass
class _Entry:
    step: int
    kind: str  # "layer" | "scalar" | "gradient"
    names: tuple[str, ...]
    values_N: Tensor


class MetricBuffer:
    """Losses and gradient norms of the latest updates, on the device until `read`."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._steps: set[int] = set()

    @property
    def updates(self) -> int:
        """Updates waiting to be read."""
        return len(self._steps)

    def add_losses(self, step: int, values: Mapping[str, Any]) -> None:
        """Take what `Stage.micro_step` returned: scalars, and `layer_losses` (a list, or by layer)."""
        layers = values.get("layer_losses", {})
        if not isinstance(layers, Mapping):
            layers = dict(enumerate(layers))
        if layers:
            # before the total, so that the layer is named and not the sum that it spoilt
            self._add(step, "layer", tuple(str(layer) for layer in layers), list(layers.values()))
        scalars = {name: value for name, value in values.items() if name != "layer_losses"}
        self._add(step, "scalar", tuple(scalars), list(scalars.values()))

    def add_gradients(self, step: int, names: tuple[str, ...], norms_P: Tensor) -> None:
        if names:
            self._entries.append(_Entry(step, "gradient", names, norms_P.detach().float()))
            self._steps.add(step)

    def read(self, group: Group = SINGLE) -> list[tuple[int, dict[str, float]]]:
        """Empty the buffer: (step, scalars averaged over its micro-batches on all ranks), oldest first.

        Raises:
            NonFinite: with the first number that is NaN or infinite.
        """
        entries, self._entries, self._steps = self._entries, [], set()
        if not entries:
            return []
        device = entries[-1].values_N.device
        ranks = group.gather(torch.cat([entry.values_N.to(device) for entry in entries]).tolist())
        sums: dict[int, dict[str, list[float]]] = {}
        start = 0
        for entry in entries:
            for place, name in enumerate(entry.names, start):
                values = [numbers[place] for numbers in ranks]
                for rank, value in enumerate(values):
                    if not math.isfinite(value):
                        alone = group.world > 1 and entry.kind != "gradient"  # gradients are of all ranks
                        raise NonFinite(entry.step, _describe(entry.kind, name), value, rank if alone else None)
                if entry.kind == "scalar":
                    sums.setdefault(entry.step, {}).setdefault(name, []).extend(values)
            start += len(entry.names)
        return [
            (step, {name: sum(values) / len(values) for name, values in scalars.items()})
            for step, scalars in sums.items()
        ]

    def _add(self, step: int, kind: str, names: tuple[str, ...], values: list[Any]) -> None:
        tensors = [value for value in values if isinstance(value, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        values_N = torch.stack(
            [torch.as_tensor(value, dtype=torch.float32, device=device).detach().reshape(()) for value in values]
        )
        self._entries.append(_Entry(step, kind, names, values_N))
        self._steps.add(step)


def _describe(kind: str, name: str) -> str:
    if kind == "layer":
        return f"the loss of layer {name}"
    return f"the gradient of {name}" if kind == "gradient" else f"the {name}"


@dataclass
class TrainState:
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
        self.train_sums, self.train_updates = {}, 0
        return means

    def evaluated(self, metric: float, patience: int | None) -> bool:
        """Compare an evaluation at this step with the best before. Returns whether it is better.

        Args:
            patience: stop after so many evaluations without gain; None: never.
        """
        is_best = metric < self.best_metric
        if is_best:
            self.best_metric, self.best_step, self.without_gain = metric, self.step, 0
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
