from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console
from toy_stage import ToyDataset, ToyStage, toy_config

from lolcats.errors import UserError
from lolcats.training.loop import train
from lolcats.training.progress import LineProgress, Progress, RichProgress, TensorBoardLog, make_progress


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def lines(stream):
    return stream.getvalue().splitlines()


def console(terminal=False):
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=200), stream


def test_one_line_per_evaluation_and_interval():
    where, stream = console()
    clock = Clock()
    progress = LineProgress(where, interval_s=10, clock=clock)
    progress.start("adjust", "perplexity", 40, 0)
    progress.evaluated(0, 9.5, True)
    for step in range(1, 9):
        clock.now += 3
        progress.update(step, 1.0 / step, 1e-4, step * 30_000)
    progress.evaluated(8, 7.25, False)
    assert lines(stream) == [
        "adjust 0/40  perplexity 9.5 (best)",
        "adjust 4/40  loss 0.25  lr 0.0001  10.0k tokens/s  ETA 0:01:48",
        "adjust 8/40  loss 0.125  lr 0.0001  10.0k tokens/s  ETA 0:01:36",
        "adjust 8/40  loss 0.125  lr 0.0001  10.0k tokens/s  ETA 0:01:36  perplexity 7.25",
    ]


def test_speed_after_resuming_counts_from_there():
    where, stream = console()
    clock = Clock()
    progress = LineProgress(where, interval_s=0, clock=clock)
    progress.start("transfer", "loss", 100, 50)
    clock.now += 100  # loading
    progress.update(51, 1.0, 0.01, 5100)
    clock.now += 2
    progress.update(52, 1.0, 0.01, 5200)
    assert "tokens/s" not in lines(stream)[0]
    assert lines(stream)[1].endswith("50 tokens/s  ETA 0:01:36")


def test_bar_on_a_terminal():
    where, stream = console(terminal=True)
    progress = make_progress(console=where)
    assert isinstance(progress, RichProgress)
    progress.start("transfer", "loss", 10, 0)
    progress.evaluated(0, 5.0, True)
    progress.update(3, 0.5, 0.01, 3000)
    progress.message("a [note]")
    progress.evaluated(3, 4.0, True)
    progress.close()
    progress.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    for part in ("transfer", "3/10", "loss 0.5", "lr 0.01", "tokens/s", "ETA", "loss 4 (best)", "a [note]"):
        assert part in text


def test_choice():
    assert isinstance(make_progress(console=console()[0]), LineProgress)
    assert type(make_progress(quiet=True)) is Progress


@pytest.mark.parametrize("terminal", [True, False])
def test_training_reports_through_it_and_closes_it(tmp_path, terminal):
    where, stream = console(terminal=terminal)
    progress = make_progress(console=where)
    train(ToyStage(), ToyDataset(), toy_config(), seed=0, directory=tmp_path, progress=progress)
    assert "12/12" in stream.getvalue()
    if isinstance(progress, RichProgress):
        assert progress.bars is None


def test_bar_is_closed_after_an_error(tmp_path):
    progress = RichProgress(console(terminal=True)[0])
    stage = ToyStage()

    def fail(count):
        raise KeyboardInterrupt

    stage.before_step = fail
    with pytest.raises(KeyboardInterrupt):
        train(stage, ToyDataset(), toy_config(), seed=0, directory=tmp_path, progress=progress)
    assert progress.bars is None


def test_tensorboard_scalars(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logs = tmp_path / "logs"
    stage = ToyStage(per_block=True)
    train(stage, ToyDataset(), toy_config(), seed=0, directory=tmp_path / "run", tensorboard=logs)
    read = events.EventAccumulator(str(logs))
    read.Reload()
    assert [event.step for event in read.Scalars("toy/validation/loss")] == [0, 3, 6, 9, 12]
    assert len(read.Scalars("toy/train/loss")) == 12
    assert read.Scalars("toy/lr/block_1")[0].value == pytest.approx(0.1)


def test_missing_tensorboard_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"lolcats\[tensorboard\]"):
        train(ToyStage(), ToyDataset(), toy_config(), seed=0, directory=tmp_path, tensorboard=tmp_path / "logs")
    TensorBoardLog(None, "toy").scalars(0, {"loss": 1.0})
