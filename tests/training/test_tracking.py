from functools import partial

import pytest
from toy_stage import Killed, ToyStage, kill_at, run

from lolcats.config import LinearizeConfig
from lolcats.errors import UserError
from lolcats.training.progress import Progress, check_tracker, open_tracker


def test_tensorboard_shows_a_resumed_stage_as_an_unbroken_one(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def train(folder, stage, **options):
        progress = Progress(tracking=partial(open_tracker, "tensorboard", folder / "run" / "tracking", {"seed": 0}))
        return run(stage, folder / "run" / "toy", progress=progress, **options)

    def curves(folder):
        read = events.EventAccumulator(str(folder / "run" / "tracking" / "toy"))
        read.Reload()
        return {name: [(event.step, event.value) for event in read.Scalars(name)] for name in read.Tags()["scalars"]}

    train(tmp_path / "unbroken", ToyStage(per_block=True))
    with pytest.raises(Killed):
        train(tmp_path / "resumed", ToyStage(per_block=True, before_step=kill_at(20)))  # in update 7; saved after 4
    train(tmp_path / "resumed", ToyStage(per_block=True), resume=True)
    unbroken = curves(tmp_path / "unbroken")
    assert curves(tmp_path / "resumed") == unbroken
    assert [step for step, _ in unbroken["toy/validation/loss"]] == [0, 3, 6, 9, 12]
    assert [step for step, _ in unbroken["toy/train/loss"]] == list(range(1, 13))
    assert unbroken["toy/lr/block_1"][0][1] == pytest.approx(0.1)


def test_a_tracker_that_is_missing_or_unknown_is_refused(monkeypatch):
    monkeypatch.setattr("lolcats.training.progress.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install wandb"):
        check_tracker("wandb")
    with pytest.raises(UserError, match=r"output.track: .*'tensorboard', 'wandb' or 'trackio'"):
        LinearizeConfig.from_dict({"output": {"track": "wandbb"}})
