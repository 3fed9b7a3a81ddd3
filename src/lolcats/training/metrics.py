"""Training metrics on their way from the device to the host.

Reading a number from a GPU waits for all its queued work. So the numbers of several updates are kept on the device
and read together, and a NaN is noticed then: before anything that was trained with it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lolcats.errors import UserError
from lolcats.parallel.group import SINGLE, Group

LAYER, SCALAR, GRADIENT = "the loss of layer {}", "the {}", "the gradient of {}"


class TrainingDiverged(UserError):
    """A loss, gradient or validation metric is NaN or infinite."""


@dataclass(eq=False)
class NonFinite(Exception):
    """Internal: a number that is NaN or infinite; the loop turns it into TrainingDiverged.

    Attributes:
        step: update in which it appeared, counted from 1 (0: before training).
        what: the quantity, with its layer or parameter where known.
        rank: the process in which it appeared, if there are several and one alone had it.
    """

    step: int
    what: str
    value: float
    rank: int | None = None


class MetricBuffer:
    """Losses and gradient norms of the latest updates, on the device until `read`."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, str, Sequence[str], Tensor]] = []
        """Update, what the numbers are (`{}` stands for a name), their N names and values [N]."""

    @property
    def updates(self) -> int:
        """Updates waiting to be read."""
        return len({step for step, *_ in self._entries})

    def add_losses(self, step: int, values: Mapping[str, Any]) -> None:
        """Take what `Stage.micro_step` returned."""
        layers = values.get("layer_losses", {})
        scalars = {name: value for name, value in values.items() if name != "layer_losses"}
        # layers before the total, so that the layer is named and not the sum that it spoilt
        for what, named in ((LAYER, layers), (SCALAR, scalars)):
            if named:
                values_N = torch.stack([value.detach().float().reshape(()) for value in named.values()])
                self._entries.append((step, what, [str(name) for name in named], values_N))

    def add_gradients(self, step: int, names: Sequence[str], norms_P: Tensor) -> None:
        if names:
            self._entries.append((step, GRADIENT, names, norms_P.detach().float()))

    def read(self, group: Group = SINGLE) -> list[tuple[int, dict[str, float]]]:
        """Empty the buffer: (step, scalars averaged over its micro-batches on all ranks), oldest first.

        Raises:
            NonFinite: with the first number that is NaN or infinite.
        """
        entries, self._entries = self._entries, []
        if not entries:
            return []
        device = entries[-1][-1].device
        ranks = group.gather(torch.cat([values_N.to(device) for *_, values_N in entries]).tolist())
        numbers = zip(*ranks, strict=True)  # each by rank
        sums: dict[int, dict[str, list[float]]] = {}
        for step, what, names, _ in entries:
            for name, values in zip(names, numbers, strict=False):
                for rank, value in enumerate(values):
                    if not math.isfinite(value):
                        alone = group.world > 1 and what != GRADIENT  # gradients are of all ranks
                        raise NonFinite(step, what.format(name), value, rank if alone else None)
                if what == SCALAR:
                    sums.setdefault(step, {}).setdefault(name, []).extend(values)
        return [
            (step, {name: sum(values) / len(values) for name, values in scalars.items()})
            for step, scalars in sums.items()
        ]
