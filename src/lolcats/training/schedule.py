"""Learning rates by update."""

from __future__ import annotations

import math

from lolcats.config import OptimSection
from lolcats.errors import UserError


class Schedule:
    """The learning rate of every update of a stage; that of the plateau schedule is kept by the optimizer.

    Args:
        total_steps: updates of the whole stage.

    Raises:
        UserError: the warm-up leaves no update.
    """

    def __init__(self, config: OptimSection, total_steps: int) -> None:
        if config.warmup_steps >= total_steps:
            raise UserError(
                f"warmup_steps={config.warmup_steps} is not less than the {total_steps} updates of the stage; lower it,"
                " or train longer"
            )
        self.config, self.total_steps = config, total_steps
        self.floor = min(config.min_lr, config.lr)

    def lr(self, update: int, plateau_lr: float) -> float:
        """Learning rate of an update, counted from 0; `plateau_lr` is where the plateau schedule stands."""
        return self._after_warmup(update, plateau_lr) * self._warmup(update)

    def _warmup(self, update: int) -> float:
        """Reaches 1 with the last update of the warm-up."""
        steps = self.config.warmup_steps
        return 1.0 if update >= steps else (update + 1) / steps

    def _after_warmup(self, update: int, plateau_lr: float) -> float:
        config, warmup = self.config, self.config.warmup_steps
        if config.schedule == "plateau":
            return plateau_lr
        if config.schedule == "cosine":
            done = min(max(update - warmup, 0) / (self.total_steps - warmup), 1.0)
            return self._between(0.5 * (1.0 + math.cos(math.pi * done)))
        if config.schedule == "wsd":
            falling = min(max(1, round(config.decay_share * self.total_steps)), self.total_steps - warmup)
            return self._between(min(max(self.total_steps - update, 0) / falling, 1.0))
        return config.lr

    def _between(self, share: float) -> float:
        return self.floor + (self.config.lr - self.floor) * share
