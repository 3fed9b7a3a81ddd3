"""Losses and gradient norms on their way from the device to the host, and the watch over them.

Reading a number from a GPU waits for all its queued work. So the numbers of several updates are kept on the
device and read together, and a NaN is noticed then: before anything that was trained with it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lolcats.errors import UserError
from lolcats.parallel.group import SINGLE, Group


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
        self.stage = stage
        self.step = step
        self.what = what
        self.rank = rank


class NonFinite(Exception):
    """Internal: found by `Readings.read`; the loop turns it into TrainingDiverged."""

    def __init__(self, step: int, what: str, value: float, rank: int | None = None):
        super().__init__(step, what, value, rank)
        self.step = step
        self.what = what
        self.value = value
        self.rank = rank


@dataclass
class _Entry:
    step: int
    kind: str  # "layer" | "scalar" | "gradient"
    names: tuple[str, ...]
    values_N: Tensor


class Readings:
    """Numbers of the latest updates, on the device until `read`."""

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
        entries = self._entries
        self._entries = []
        self._steps = set()
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
    if kind == "gradient":
        return f"the gradient of {name}"
    return f"the {name}"
