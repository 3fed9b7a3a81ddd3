"""Progress display: a bar on a terminal, lines elsewhere, curves in a tracker on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from lolcats.errors import UserError


class Progress:
    """A stage's progress: a live bar on a terminal; else a line per evaluation, and one every `interval_s` seconds.

    Call order: `start`, then any of `update`, `log`, `evaluated`, `message`, then `close`. `tracking` opens a tracker
    for a stage and its first step.
    """

    def __init__(
        self,
        console: Console | None = None,
        tracking: Callable[[str, int], GeneralTracker] | None = None,
        *,
        interval_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console(quiet=True)
        self.interval_s, self.clock, self.shown_at = interval_s, clock, clock()
        self.stage = self.metric = self.training = self.validation = ""
        self.total_steps = 0
        self.bars = Bars(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            console=self.console,
            get_time=clock,
            speed_estimate_period=3600,
            disable=self.console.quiet or not self.console.is_terminal,
        )
        self.bars.add_task("", numbers="")
        (self.task,) = self.bars.tasks
        self.tracking = tracking
        self.tracker: GeneralTracker | None = None

    def start(self, stage: str, metric: str, total_steps: int, step: int) -> None:
        """A stage begins, or resumes after `step`."""
        self.stage, self.metric, self.total_steps, self.shown_at = stage, metric, total_steps, self.clock()
        self.training = self.validation = ""
        self.bars.reset(self.task.id, total=total_steps, completed=step, description=stage, numbers="starting")
        self.bars.start()

    def update(self, step: int, values: str, tokens: int) -> None:
        """Steps up to `step` are done; `tokens` is the stage's total so far. Speeds are of this call of `start`."""
        task = self.task
        self.bars.update(task.id, completed=step)
        self.training = f"{values}{tokens / 1e6:,.2f}M tokens"
        if task.speed and task.time_remaining is not None:
            left = timedelta(seconds=task.time_remaining)
            self.training += f"  {task.speed * tokens / step:,.0f} tokens/s  ETA {left}"
        self._show(at_once=False)

    def evaluated(self, step: int, value: float, is_best: bool) -> None:
        """The validation metric was measured."""
        self.bars.update(self.task.id, completed=step)
        self.validation = f"{self.metric} at {step}: {value:.4g}{' (best)' if is_best else ''}"
        self._show(at_once=True)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Numbers for the tracker alone."""
        if self.tracking is None:
            return
        if self.tracker is None:
            self.tracker = self.tracking(self.stage, step)
        self.tracker.log({f"{self.stage}/{name}": value for name, value in scalars.items()}, step=step)

    def message(self, text: str) -> None:
        """Something a user should read; it scrolls above a bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """The stage ended or failed."""
        self.bars.stop()
        if self.tracker is not None:
            self.tracker.finish()
            self.tracker = None

    def _show(self, at_once: bool) -> None:
        numbers = "  ".join(part for part in (self.training, self.validation) if part)
        self.bars.update(self.task.id, numbers=numbers)
        if self.bars.disable and (at_once or self.clock() - self.shown_at >= self.interval_s):
            self.shown_at = self.clock()
            self.message(f"{self.stage} {self.task.completed:.0f}/{self.total_steps}  {numbers}")


def check_tracker(name: str) -> None:
    if find_spec(name) is None:
        raise UserError(f"--track {name} needs a package: pip install {name}, or --set output.track=null")


def open_tracker(name: str, folder: Path, settings: dict[str, Any], stage: str, step: int) -> GeneralTracker:
    """The tracker's run of a stage; TensorBoard replaces what was logged from `step` on."""
    PartialState()  # accelerate's trackers ask it who they are; it takes up the processes' group as it is
    options: dict[str, Any] = {"name": f"{folder.resolve().parents[1].name}-{stage}", "config": settings}
    if name == "tensorboard":
        options = {"logging_dir": folder, "purge_step": step}
    tracker = LOGGER_TYPE_TO_CLASS[name](stage if name == "tensorboard" else "lolcats", **options)
    tracker.start()
    return tracker
