import pytest
from accelerate.tracking import GeneralTracker
from toy_stage import Killed, ToyStage, kill_at, run

from lolcats.config import LinearizeConfig
from lolcats.errors import UserError
from lolcats.training import tracking
from lolcats.training.progress import Progress
from lolcats.training.tracking import Tracking

SERVICES = ["wandb", "trackio"]


@pytest.fixture
def runs(monkeypatch):
    """What a service is sent, by run: (project, options, logged), in the place of every service."""
    started = []

    class Service(GeneralTracker):
        name, requires_logging_directory, tracker = "service", False, None

        def __init__(self, project, **options):
            super().__init__()
            self.sent = (project, options, [])

        def start(self):
            started.append(self.sent)

        def log(self, values, step=None, **_):
            self.sent[2].append((step, values))

        def finish(self):
            self.sent[2].append("finished")

    monkeypatch.setattr(tracking, "find_spec", lambda name: name)
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", dict.fromkeys(SERVICES, Service))
    return started


def train(folder, name, **options):
    progress = Progress(tracking=Tracking(name, folder / "run" / "tracking", {"seed": 0}))
    return run(options.pop("stage", ToyStage(per_block=True)), folder / "run" / "toy", progress=progress, **options)


def interrupt(folder, name):
    with pytest.raises(Killed):
        train(folder, name, stage=ToyStage(per_block=True, before_step=kill_at(20)))  # in update 7; saved after 4


def test_tensorboard_shows_a_resumed_stage_as_an_unbroken_one(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def curves(folder):
        read = events.EventAccumulator(str(folder / "run" / "tracking" / "toy"))
        read.Reload()
        return {name: [(event.step, event.value) for event in read.Scalars(name)] for name in read.Tags()["scalars"]}

    train(tmp_path / "unbroken", "tensorboard")
    interrupt(tmp_path / "resumed", "tensorboard")
    train(tmp_path / "resumed", "tensorboard", resume=True)
    unbroken = curves(tmp_path / "unbroken")
    assert curves(tmp_path / "resumed") == unbroken
    assert [step for step, _ in unbroken["toy/validation/loss"]] == [0, 3, 6, 9, 12]
    assert [step for step, _ in unbroken["toy/train/loss"]] == list(range(1, 13))
    assert unbroken["toy/lr/block_1"][0][1] == pytest.approx(0.1)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_goes_on_with_the_run_of_an_interrupted_stage(tmp_path, runs, name):
    interrupt(tmp_path / "a", name)
    train(tmp_path / "a", name, resume=True)
    train(tmp_path / "b", name)
    (project, first, _), (_, resumed, logged), (_, other, _) = runs
    assert project == "lolcats"
    assert first == resumed
    assert (first["group"], first["resume"], first["config"]) == ("a", "allow", {"seed": 0})
    assert (other["group"], other["name"]) != (first["group"], first["name"])
    assert logged[0][0] == 5
    assert logged[-2][0] == 12
    assert logged[-1] == "finished"


def test_a_tracker_that_is_missing_or_unknown_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install wandb"):
        Tracking("wandb", tmp_path)
    with pytest.raises(UserError, match=r"output.track: .*'tensorboard', 'wandb' or 'trackio'"):
        LinearizeConfig.from_dict({"output": {"track": "wandbb"}})
