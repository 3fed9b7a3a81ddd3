"""The order of runs, with folders that only look like runs."""

from __future__ import annotations

import pytest

from lolcats.config import DataSource
from lolcats.sweep.execution import Task
from lolcats.sweep.queue import Queue, covers
from lolcats.sweep.spec import Evaluate, read_sweep


@pytest.fixture
def tasks(sweep_file, tmp_path):
    """Ranks 2 and 4, each with seeds 0 and 1: two stages 1, four different runs."""
    sweep, runs = read_sweep(sweep_file)
    return [Task(sweep.model_copy(update={"held_out": {}}), run, tmp_path / "sweep") for run in runs]


def end_stage_1(task):
    file = task.output / "run" / "transfer" / "done.json"
    file.parent.mkdir(parents=True)
    file.touch()


def test_runs_wait_for_the_stage_1_that_they_share(tasks):
    a0, a1, b0, b1 = tasks
    queue = Queue(tasks, [])
    assert [queue.take(busy).task for busy in ([], [a0])] == [a0, a1]
    assert queue.take([a0, a1]) is None  # both need what is being trained
    end_stage_1(a1)
    step = queue.take([a0, a1])
    assert (step.task, step.donor) == (b1, a1.output)
    assert queue.take([a0]) is None
    step = queue.take([a1])  # a0 failed: the next one trains
    assert (step.task, step.donor) == (b0, None)


def test_a_run_that_was_begun_goes_on_by_itself(tasks):
    a0, _, b0, _ = tasks
    end_stage_1(a0)
    (b0.output / "run").mkdir(parents=True)
    assert Queue([b0, a0], []).take([]).donor is None


def test_equal_settings_run_once(tasks, tmp_path):
    a0, a1, *_ = tasks
    twin = Task(a0.sweep, a0.run, tmp_path / "another")
    queue = Queue([twin, a1], [])
    assert queue.take([a0]).task is a1
    assert queue.take([a0]) is None
    row = {
        "run": "first",
        "case": {},
        "seed": 0,
        "key": a0.run.key,
        "status": "finished",
        "perplexity": {"adjust": 2.0},
    }
    queue.ended(row | {"status": "failed"})
    assert queue.take([a0]) is None
    queue.ended(row)
    step = queue.take([])
    assert step.row == row | {"run": a0.run.name, "case": a0.run.case, "row_of": "first"}
    assert queue.waiting == []


def test_a_row_counts_only_with_all_that_is_measured(tasks):
    task = tasks[0]
    measured = task.sweep.model_copy(
        update={
            "held_out": {"text": DataSource(path="demo")},
            "held_out_length": 32,
            "evaluate": Evaluate(tasks="piqa,passkey"),
        }
    )
    wanted = Task(measured, task.run, task.folder)
    how = {"held_out": {"text": {"path": "demo"}}, "held_out_length": 32}
    row = {"held_out_how": how, "evaluation": {"tasks": {"piqa": {"value": 0.5}}, "passkey": []}}
    assert covers({}, task)
    assert covers(row, wanted)
    assert not covers(row | {"held_out_how": {}}, wanted)
    assert not covers(row | {"held_out_how": how | {"held_out_length": 64}}, wanted)
    assert not covers({"held_out_how": how}, wanted)
    assert not covers(row | {"evaluation": {"passkey": []}}, wanted)
    assert not covers(row | {"evaluate": {"limit": 100}}, wanted)
