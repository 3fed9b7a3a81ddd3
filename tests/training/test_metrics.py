"""What is NaN or infinite ends a run with its name, and nothing trained with it is kept."""

import math

import pytest
import torch
from toy_stage import ToyStage, equal_weights, folders, run

from lolcats.training import loop
from lolcats.training.checkpoint import list_checkpoints, read_checkpoint
from lolcats.training.metrics import TrainingDiverged
from lolcats.training.stage import weights_of

NAN = float("nan")


class Failing(ToyStage):
    """From micro-step `start` on, layers 1 and 2 have losses (or only gradients) that are not finite."""

    def __init__(self, start: int, in_loss: bool, value: float = NAN):
        super().__init__(layers=3)
        self.start, self.in_loss, self.value = start, in_loss, value

    def micro_step(self, batch, scale):
        result = super().micro_step(batch, scale)
        if self.micro_steps >= self.start:
            for number in (1, 2):
                self.parameters[number].grad[0] = self.value
                if self.in_loss:
                    result["layer_losses"][number] = result["loss"] = torch.tensor(self.value)
        return result


@pytest.mark.parametrize("read_every", [1, 5, 100])
@pytest.mark.parametrize(
    ("in_loss", "value", "what"),
    [(True, -math.inf, "the loss of layer 1 is -inf"), (False, NAN, "the gradient of layers.1.weight is nan")],
)
def test_divergence_stops_and_keeps_what_is_good(tmp_path, monkeypatch, read_every, in_loss, value, what):
    monkeypatch.setitem(loop.READ_EVERY, "cpu", read_every)
    good = ToyStage(layers=3)
    run(good, tmp_path / "good", max_steps=4, eval_every=4)
    # micro-step 16 is in update 6, after the checkpoint at 4 and before the evaluation at 6
    with pytest.raises(TrainingDiverged) as caught:
        run(Failing(16, in_loss, value), tmp_path / "bad")
    message = str(caught.value)
    assert f"stage toy, step 6: {what}" in message
    assert "step-00000004" in message
    assert "Lower toy.lr (now 0.1)" in message
    assert folders(tmp_path / "bad") == ["step-00000004"]
    assert equal_weights(read_checkpoint(tmp_path / "bad" / "step-00000004")[0]["weights"], weights_of(good))


class BadLoss(ToyStage):
    """One loss is NaN, its gradient is not."""

    def micro_step(self, batch, scale):
        value = NAN if self.micro_steps == 16 else 1.0
        return {**super().micro_step(batch, scale), "loss": torch.tensor(value)}


@pytest.mark.parametrize("changes", [{"eval_every": 6}, {"eval_every": 100, "checkpoint_every": 6}])
@pytest.mark.parametrize("stage", [lambda: Failing(16, False), BadLoss])
def test_nothing_is_kept_of_a_step_that_was_not_read_yet(tmp_path, monkeypatch, changes, stage):
    """Update 6 is the bad one, and the first to be evaluated or saved."""
    monkeypatch.setitem(loop.READ_EVERY, "cpu", 100)
    with pytest.raises(TrainingDiverged, match="step 6"):
        run(stage(), tmp_path, **{"checkpoint_every": 100, **changes})
    assert not list_checkpoints(tmp_path)


def test_gradients_are_watched_without_clipping(tmp_path):
    with pytest.raises(TrainingDiverged, match=r"and set toy\.clip_norm"):
        run(Failing(16, False), tmp_path, clip_norm=None)


@pytest.mark.parametrize(
    ("metrics", "what"),
    [([3.0, NAN], "step 3: the validation loss is nan"), ([math.inf], "step 0: .* is inf")],
)
def test_bad_metric_is_never_the_best(tmp_path, metrics, what):
    with pytest.raises(TrainingDiverged, match=what):
        run(ToyStage(metrics=metrics), tmp_path)
    assert not list_checkpoints(tmp_path)


def test_bad_block_metric_names_the_block(tmp_path):
    class Bad(ToyStage):
        def evaluate(self):
            return {"loss": 1.0, "block_metrics": [1.0, NAN]}

    with pytest.raises(TrainingDiverged, match="the validation loss of block 1 is nan"):
        run(Bad(per_block=True), tmp_path)
