"""How training shows itself: a bar on a terminal, lines elsewhere, TensorBoard on request."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from lolcats.errors import UserError


class Progress:
    """Reports nothing: the base of the others, and the quiet variant.

    Call order: `start`, then any of `update`, `evaluated`, `message`, then `close`.
    """

    def start(self, stage: str, metric: str, total_steps: int, step: int) -> None:
        """A stage begins, or goes on after `step`."""

    def update(self, step: int, loss: float, lr: float, tokens: int) -> None:
        """An update was read; `tokens` is the stage's total so far."""

    def evaluated(self, step: int, value: float, is_best: bool) -> None:
        """The validation metric was measured."""

    def message(self, text: str) -> None:
        """Something a user should read."""

    def close(self) -> None:
        """The stage ended or failed."""


class _Meter(Progress):
    """Keeps what both visible variants show."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self.console = console
        self.clock = clock
        self.stage = ""
        self.metric = ""
        self.total_steps = 0
        self.first_step = 0
        self.first_tokens: int | None = None
        self.started = clock()
        self.validation = ""

    def start(self, stage: str, metric: str, total_steps: int, step: int) -> None:
        self.stage = stage
        self.metric = metric
        self.total_steps = total_steps
        self.first_step = step
        self.first_tokens = None if step else 0
        self.started = self.clock()
        self.validation = ""

    def evaluated(self, step: int, value: float, is_best: bool) -> None:
        self.validation = f"{self.metric} {value:.4g}{' (best)' if is_best else ''}"

    def message(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def describe(self, step: int, loss: float, lr: float, tokens: int) -> str:
        """`loss 0.0312  lr 0.01  12.3k tokens/s  ETA 0:12:34`; speeds are of this process alone."""
        seconds = max(self.clock() - self.started, 1e-9)
        parts = [f"loss {loss:.4g}", f"lr {lr:.3g}"]
        if self.first_tokens is None:
            # resumed: the first update read is the reference, from here on
            self.first_tokens = tokens
            self.first_step = step
            self.started = self.clock()
        elif step > self.first_step:
            parts.append(f"{_short((tokens - self.first_tokens) / seconds)} tokens/s")
            parts.append(f"ETA {_clock((self.total_steps - step) * seconds / (step - self.first_step))}")
        return "  ".join(parts)


class LineProgress(_Meter):
    """One line per evaluation, and one every `interval_s` seconds."""

    def __init__(self, console: Console, interval_s: float = 30.0, clock: Callable[[], float] = time.monotonic):
        super().__init__(console, clock)
        self.interval_s = interval_s
        self.printed = clock()
        self.latest = ""

    def start(self, stage: str, metric: str, total_steps: int, step: int) -> None:
        super().start(stage, metric, total_steps, step)
        self.printed = self.clock()
        self.latest = ""

    def update(self, step: int, loss: float, lr: float, tokens: int) -> None:
        self.latest = self.describe(step, loss, lr, tokens)
        if self.clock() - self.printed >= self.interval_s:
            self._print(step, self.latest)

    def evaluated(self, step: int, value: float, is_best: bool) -> None:
        super().evaluated(step, value, is_best)
        self._print(step, "  ".join(part for part in (self.latest, self.validation) if part))

    def _print(self, step: int, text: str) -> None:
        self.printed = self.clock()
        self.message(f"{self.stage} {step}/{self.total_steps}  {text}")


class RichProgress(_Meter):
    """A live bar; messages scroll above it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        super().__init__(console, clock)
        self.bars: Bars | None = None
        self.task: Any = None
        self.latest = ""

    def start(self, stage: str, metric: str, total_steps: int, step: int) -> None:
        super().start(stage, metric, total_steps, step)
        self.latest = ""
        self.bars = Bars(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            console=self.console,
        )
        self.bars.start()
        self.task = self.bars.add_task(stage, total=total_steps, completed=step, numbers="evaluating")

    def update(self, step: int, loss: float, lr: float, tokens: int) -> None:
        self.latest = self.describe(step, loss, lr, tokens)
        self._show(step)

    def evaluated(self, step: int, value: float, is_best: bool) -> None:
        super().evaluated(step, value, is_best)
        self._show(step)

    def close(self) -> None:
        if self.bars is not None:
            self.bars.stop()
            self.bars = None

    def _show(self, step: int) -> None:
        if self.bars is not None:
            numbers = "  ".join(part for part in (self.latest, self.validation) if part)
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
