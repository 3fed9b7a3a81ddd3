import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from toy_stage import Killed, ToyStage, copy_weights, equal_weights, folders, kill_at, run

from lolcats.config import ModelSection
from lolcats.errors import Terminated
from lolcats.training import loop
from lolcats.training.checkpoint import list_checkpoints
from lolcats.training.run_folder import weights_hash
from lolcats.training.stage import weights_of


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def toy(request):
    return partial(ToyStage, per_block=True, dropout=0.3, device=request.param)


@pytest.mark.parametrize(("size", "place"), [(3 << 20, 1_500_000), (65 << 20, 33 << 20), (65 << 20, (65 << 20) - 1)])
def test_a_changed_byte_makes_other_weights(tmp_path, size, place):
    def weights(value):
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(size)
            file.seek(place)
            file.write(value)
        return weights_hash(ModelSection(path=str(tmp_path)))

    assert weights(b"a") != weights(b"b")


def comparable(result):
    history = [{key: value for key, value in entry.items() if key != "seconds"} for entry in result.history]
    return history, result.tokens, result.best_step, result.best_metric


@pytest.fixture
def unbroken(tmp_path, toy):
    """Final weights and result of a run without interruption."""
    stage = toy()
    result = run(stage, tmp_path / "unbroken")
    return copy_weights(stage), result


def run_until(toy, micro_step, directory, **options):
    """A run that is killed at a micro-step of its own."""
    with pytest.raises(Killed):
        run(toy(before_step=kill_at(micro_step)), directory, **options)


@pytest.mark.parametrize("micro_step", [1, 12, 13, 20, 36])
def test_resumed_run_equals_the_unbroken_one(tmp_path, toy, unbroken, micro_step):
    weights, result = unbroken
    run_until(toy, micro_step, tmp_path / "broken")
    torch.manual_seed(7)  # another process has another random state
    stage = toy()
    resumed = run(stage, tmp_path / "broken", resume=True)
    last_checkpoint = (micro_step - 1) // 3 // 4 * 4
    assert stage.micro_steps == 36 - 3 * last_checkpoint
    assert equal_weights(weights_of(stage), weights)
    assert comparable(resumed) == comparable(result)
    assert folders(tmp_path / "broken") == folders(tmp_path / "unbroken")


def test_killed_at_every_step_of_writing(tmp_path, toy, monkeypatch):
    """Files are flushed, renamed and removed many times in a run; it may end at each of these moments."""
    short = {"max_steps": 3, "eval_every": 3, "checkpoint_every": 2, "micro_batch_size": 6}
    stage = toy()
    run(stage, tmp_path / "unbroken", **short)
    weights = copy_weights(stage)
    calls = {"count": 0, "last": 0}

    def counted(function):
        def wrapper(*arguments, **options):
            calls["count"] += 1
            if calls["count"] == calls["last"]:
                raise Killed
            return function(*arguments, **options)

        return wrapper

    for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    run(toy(), tmp_path / "counting", **short)
    total = calls["count"]
    assert total > 8
    for last in range(1, total + 1):
        directory = tmp_path / f"killed-{last}"
        calls.update(count=0, last=last)
        with pytest.raises(Killed):
            run(toy(), directory, **short)
        calls.update(last=0)
        stage = toy()
        run(stage, directory, resume=True, **short)
        assert equal_weights(weights_of(stage), weights), f"killed at operation {last} of {total}"
        assert folders(directory)[-1] == folders(tmp_path / "unbroken")[-1] == "step-00000003"


def test_finished_stage_is_skipped_and_leaves_the_same_random_state(tmp_path, toy):
    trained, skipped = toy(), toy()
    result = run(trained, tmp_path)
    drawn = torch.rand(3)
    assert run(skipped, tmp_path, resume=True) == result
    assert torch.equal(torch.rand(3), drawn)
    assert skipped.micro_steps == 0
    assert equal_weights(weights_of(skipped), weights_of(trained))


def test_settings_that_do_not_decide_may_change(tmp_path, toy, unbroken):
    weights, _ = unbroken
    run_until(toy, 20, tmp_path / "broken")
    stage = toy()
    run(stage, tmp_path / "broken", resume=True, checkpoint_every=5)
    assert equal_weights(weights_of(stage), weights)


@pytest.fixture
def heeded():
    """Ctrl-C is, also where the shell has its background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("micro_step", [5, 10_000])
@pytest.mark.parametrize(("kind", "stop"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_writes_a_checkpoint_from_which_the_run_resumes(tmp_path, toy, unbroken, micro_step, kind, stop):
    def terminate(number):
        if number == micro_step:
            os.kill(os.getpid(), kind)

    before = signal.getsignal(kind)
    stage = toy(before_step=terminate)
    if micro_step == 5:
        with pytest.raises(stop, match=r"stage toy at step \d+: its checkpoint is written"):
            run(stage, tmp_path / "run", checkpoint_every=1000)
        assert len(list_checkpoints(tmp_path / "run")) == 1
        stage = toy()
    result = run(stage, tmp_path / "run", resume=True, checkpoint_every=1000)
    assert equal_weights(copy_weights(stage), unbroken[0])
    assert comparable(result) == comparable(unbroken[1])
    assert signal.getsignal(kind) is before


@pytest.mark.usefixtures("heeded")
def test_a_second_ctrl_c_ends_at_once(tmp_path, toy, capfd):
    def interrupt(number):
        if number in (5, 6):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(toy(before_step=interrupt), tmp_path / "run", checkpoint_every=1000)
    assert not list_checkpoints(tmp_path / "run")
    assert "Ctrl-C again ends at once" in capfd.readouterr().err


def test_a_sigterm_after_the_last_update_is_not_lost():
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append("handled"))
    try:
        with loop.SignalWatch() as watch:
            os.kill(os.getpid(), signal.SIGTERM)
            assert watch.received
            assert not received
        assert received == ["handled"]
    finally:
        signal.signal(signal.SIGTERM, before)
