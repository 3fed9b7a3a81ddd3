import io

import pytest
from rich.console import Console
from toy_stage import Killed, ToyStage, kill_at, run

from lolcats.training.progress import Progress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make(terminal=False, **options):
    stream = io.StringIO()
    return Progress(Console(file=stream, force_terminal=terminal, width=200), **options), stream


def test_one_line_per_evaluation_and_interval_with_the_speed_since_resuming():
    clock = Clock()
    progress, stream = make(interval_s=10, clock=clock)
    progress.start("adjust", "perplexity", 140, 100)
    progress.evaluated(100, 9.5, True)
    clock.now += 500  # kernels are compiled
    for step in range(101, 109):
        clock.now += 3
        progress.update(step, f"loss {1 / (step - 100):.4g}  lr 1e-4  ", step * 30_000)
    progress.evaluated(108, 7.25, False)
    assert stream.getvalue().splitlines() == [
        "adjust 100/140  perplexity at 100: 9.5 (best)",
        "adjust 101/140  loss 1  lr 1e-4  3.03M tokens  perplexity at 100: 9.5 (best)",
        "adjust 105/140  loss 0.2  lr 1e-4  3.15M tokens  10,000 tokens/s  ETA 0:01:45  perplexity at 100: 9.5 (best)",
        "adjust 108/140  loss 0.125  lr 1e-4  3.24M tokens  10,000 tokens/s  ETA 0:01:36  perplexity at 108: 7.25",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_training_reports_through_it_and_closes_it(tmp_path, terminal):
    progress, stream = make(terminal)
    run(ToyStage(), tmp_path / "whole", progress=progress)
    assert "12/12" in stream.getvalue()
    progress, _ = make(terminal)
    with pytest.raises(Killed):
        run(ToyStage(before_step=kill_at(1)), tmp_path / "killed", progress=progress)
    assert not progress.bars.live.is_started
