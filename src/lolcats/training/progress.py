"""Progress display: a bar on a terminal, lines elsewhere, TensorBoard on request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from lolcats.errors import UserError


class Progress:
    """Displays nothing: the base of the others.

    Call order: `start`, then any of `update`, `evaluated`, `message`, then `close`.
    """

    def start(self, stage: str, metric: str, total_steps: int, step: int) -> None:
        """A stage begins, or resumes after `step`."""

    def update(self, step: int, loss: float, lr: float, tokens: int) -> None:
        """An update was read; `tokens` is the stage's total so far."""

    def evaluated(self, step: int, value: float, is_best: bool) -> None:
        """The validation metric was measured."""

    def message(self, text: str) -> None:
        """Something a user should read."""

    def close(self) -> None:
        """The stage ended or failed."""


class LineProgress(Progress):
    """One line per evaluation, and one every `interval_s` seconds.

    Args:
        clock: seconds, as `time.monotonic`.
    """

    def __init__(self, console: Console, interval_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.interval_s, self.clock = console, interval_s, clock

    def start(self, stage: str, metric: str, total_steps: int, step: int) -> None:
        self.stage, self.metric, self.total_steps = stage, metric, total_steps
        self.first_step, self.first_tokens = step, None if step else 0
        self.started = self.shown = self.clock()
        self.training = self.validation = ""

    def update(self, step: int, loss: float, lr: float, tokens: int) -> None:
        self.training = self.describe(step, loss, lr, tokens)
        self.show(step, self.training)

    def evaluated(self, step: int, value: float, is_best: bool) -> None:
        self.validation = f"{self.metric} {value:.4g}{' (best)' if is_best else ''}"
        self.shown = -math.inf
        self.show(step, "  ".join(part for part in (self.training, self.validation) if part))

    def message(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, step: int, text: str) -> None:
        if self.clock() - self.shown >= self.interval_s:
            self.shown = self.clock()
            self.message(f"{self.stage} {step}/{self.total_steps}  {text}")

    def describe(self, step: int, loss: float, lr: float, tokens: int) -> str:
        """`loss 0.0312  lr 0.01  12.3k tokens/s  ETA 0:12:34`; speeds are of this process alone."""
        seconds = max(self.clock() - self.started, 1e-9)
        parts = [f"loss {loss:.4g}", f"lr {lr:.3g}"]
        if self.first_tokens is None:
            # resumed: the first update read is the reference, from here on
            self.first_tokens, self.first_step, self.started = tokens, step, self.clock()
        elif step > self.first_step:
            parts.append(f"{_short((tokens - self.first_tokens) / seconds)} tokens/s")
            parts.append(f"ETA {_clock((self.total_steps - step) * seconds / (step - self.first_step))}")
        return "  ".join(parts)


class RichProgress(LineProgress):
    """A live bar; messages scroll above it."""

    bars: Bars | None = None

    def start(self, stage: str, metric: str, total_steps: int, step: int) -> None:
        super().start(stage, metric, total_steps, step)
        columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"))
        description = TextColumn("[bold]{task.description}")
        self.bars = Bars(description, *columns, TimeElapsedColumn(), console=self.console)
        self.bars.start()
        self.task = self.bars.add_task(stage, total=total_steps, completed=step, numbers="evaluating")

    def close(self) -> None:
        if self.bars is not None:
            self.bars.stop()
            self.bars = None

    def show(self, step: int, text: str) -> None:
        if self.bars is not None:
            numbers = "  ".join(part for part in (self.training, self.validation) if part)
            self.bars.update(self.task, completed=step, numbers=numbers)


def make_progress(quiet: bool = False, console: Console | None = None) -> Progress:
    """A bar if standard error is a terminal, lines otherwise, nothing if `quiet`."""
    if quiet:
        return Progress()
    console = console or Console(stderr=True)
    return RichProgress(console) if console.is_terminal else LineProgress(console)


class TensorBoardLog:
    """TensorBoard scalars of one stage; does nothing without a folder.

    Raises:
        UserError: a folder is given, but the tensorboard package is not installed.
    """

    def __init__(self, directory: Path | None, stage: str):
        self.directory, self.stage = directory, stage
        self.make_writer = None if directory is None else summary_writer()
        self.writer: Any = None

    def scalars(self, step: int, values: dict[str, float]) -> None:
        if self.make_writer is None:
            return
        if self.writer is None:
            # purge_step: after a resume, hides what the interrupted run logged from this step on
            self.writer = self.make_writer(str(self.directory), purge_step=step)
        for name, value in values.items():
            self.writer.add_scalar(f"{self.stage}/{name}", value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def summary_writer() -> Any:
    """TensorBoard's class of writers.

    Raises:
        UserError: the tensorboard package is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            "TensorBoard logs need the tensorboard package: pip install 'lolcats[tensorboard]',"
            " or set output.tensorboard=false"
        ) from error
    return SummaryWriter


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
