from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch
from toy_stage import ToyDataset, ToyStage, equal_weights, folders, toy_config

from lolcats.training import loop
from lolcats.training.checkpoint import read_checkpoint
from lolcats.training.loop import train
from lolcats.training.metrics import MetricBuffer, NonFinite, TrainingDiverged, TrainState

NAN = float("nan")


def run(stage, directory, **changes):
    return train(stage, ToyDataset(), toy_config(**changes), seed=0, directory=directory)


def test_scalars_are_averaged_over_micro_batches():
    buffer = MetricBuffer()
    buffer.add_losses(1, {"loss": torch.tensor(1.0), "mse": 10.0})
    buffer.add_losses(1, {"loss": torch.tensor(2.0), "mse": torch.tensor([30.0])})
    buffer.add_losses(2, {"loss": 5.0, "layer_losses": [1.0, 2.0]})
    buffer.add_gradients(2, ("a",), torch.tensor([1.0]))
    assert buffer.updates == 2
    assert buffer.read() == [(1, {"loss": 1.5, "mse": 20.0}), (2, {"loss": 5.0})]
    assert buffer.updates == 0
    assert buffer.read() == []


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        ([1.0, NAN, NAN], "the loss of layer 1"),
        ({4: 1.0, 9: math.inf}, "the loss of layer 9"),
        (torch.tensor([NAN, 1.0]), "the loss of layer 0"),
        ([], "the loss"),
    ],
)
def test_first_bad_layer_is_named(layers, what):
    buffer = MetricBuffer()
    buffer.add_losses(3, {"loss": 1.0})
    buffer.add_losses(4, {"loss": NAN, "layer_losses": layers})
    buffer.add_gradients(4, ("layers.0.weight",), torch.tensor([NAN]))
    with pytest.raises(NonFinite) as caught:
        buffer.read()
    assert (caught.value.step, caught.value.what) == (4, what)


class Failing(ToyStage):
    """From micro-step `start` on, layer 1 has a loss (or only a gradient) that is not finite."""

    def __init__(self, start: int, in_loss: bool, value: float = NAN):
        super().__init__()
        self.start = start
        self.in_loss = in_loss
        self.value = value

    def micro_step(self, batch, scale):
        result = super().micro_step(batch, scale)
        if self.micro_steps >= self.start:
            self.parameters[1].grad[0] = self.value
            if self.in_loss:
                result["layer_losses"][1] = torch.tensor(self.value)
                result["loss"] = torch.tensor(self.value)
        return result


@pytest.mark.parametrize("read_every", [1, 5, 100])
@pytest.mark.parametrize(
    ("in_loss", "value", "what"),
    [
        (True, NAN, "the loss of layer 1 is nan"),
        (True, -math.inf, "the loss of layer 1 is -inf"),
        (False, NAN, "the gradient of layers.1.weight is nan"),
        (False, math.inf, "the gradient of layers.1.weight is inf"),
    ],
)
def test_divergence_stops_and_keeps_what_is_good(tmp_path, monkeypatch, read_every, in_loss, value, what):
    monkeypatch.setitem(loop.READ_EVERY, "cpu", read_every)
    good = ToyStage()
    run(good, tmp_path / "good", max_steps=4)
    # micro-step 16 is in update 6, after the checkpoint at 4 and before the evaluation at 6
    with pytest.raises(TrainingDiverged) as caught:
        run(Failing(16, in_loss, value), tmp_path / "bad")
    message = str(caught.value)
    assert f"stage toy, step 6: {what}" in message
    assert "step-00000004" in message
    assert "Lower toy.lr (now 0.1)" in message
    assert (caught.value.stage, caught.value.step) == ("toy", 6)
    assert folders(tmp_path / "bad") == ["best-00000003", "step-00000004"]
    kept = read_checkpoint(tmp_path / "bad" / "step-00000004").tensors["weights"]
    last = read_checkpoint(tmp_path / "good" / "step-00000004").tensors["weights"]
    assert equal_weights(kept, last)


@pytest.mark.parametrize("changes", [{"eval_every": 6}, {"eval_every": 100, "checkpoint_every": 6}])
def test_nothing_is_kept_of_a_step_that_was_not_read_yet(tmp_path, monkeypatch, changes):
    """Update 6 is the bad one, and the first to be evaluated or saved."""
    monkeypatch.setitem(loop.READ_EVERY, "cpu", 100)
    with pytest.raises(TrainingDiverged, match="step 6"):
        run(Failing(16, False), tmp_path, **{"checkpoint_every": 100, **changes})
    assert folders(tmp_path) == ["best-00000000"]


def test_no_checkpoint_after_a_bad_loss_whose_gradient_is_good(tmp_path, monkeypatch):
    class Bad(ToyStage):
        def micro_step(self, batch, scale):
            return {**super().micro_step(batch, scale), "loss": NAN if self.micro_steps == 8 else 1.0}

    monkeypatch.setitem(loop.READ_EVERY, "cpu", 100)
    with pytest.raises(TrainingDiverged, match="step 3: the loss is nan"):
        run(Bad(), tmp_path, eval_every=100)
    assert folders(tmp_path) == ["best-00000000"]


def test_gradients_are_watched_without_clipping(tmp_path):
    with pytest.raises(TrainingDiverged, match=r"and set toy\.clip_norm"):
        run(Failing(16, False), tmp_path, clip_norm=None)


def test_bad_metric_is_never_the_best(tmp_path):
    stage = ToyStage()
    stage.metrics = [3.0, NAN]
    with pytest.raises(TrainingDiverged, match="step 3: the validation loss is nan"):
        run(stage, tmp_path)
    assert folders(tmp_path) == ["best-00000000"]


def test_bad_model_before_training(tmp_path):
    stage = ToyStage()
    stage.metrics = [math.inf]
    with pytest.raises(TrainingDiverged, match=r"step 0: the validation loss is inf. This was before training"):
        run(stage, tmp_path)


def test_bad_block_metric_names_the_block(tmp_path):
    class Bad(ToyStage):
        def evaluate(self):
            return {"loss": 1.0, "block_metrics": [1.0, NAN]}

    with pytest.raises(TrainingDiverged, match="the validation loss of block 1 is nan"):
        run(Bad(per_block=True), tmp_path)


@pytest.mark.parametrize("changes", [{"eval_every": 100}, {"eval_every": 4, "checkpoint_every": 100}])
def test_bad_weight_is_never_saved(tmp_path, changes):
    class Bad(ToyStage):
        def state(self):
            state = super().state()
            if self.micro_steps >= 10:
                state["layers.1.weight"] = state["layers.1.weight"] / 0.0
            return state

        def blocks(self):
            return [{f"layers.{n}.weight": p for n, p in self.parameters.items()}]

    with pytest.raises(TrainingDiverged, match=r"the weight layers\.1\.weight is"):
        run(Bad(), tmp_path, **changes)
    assert folders(tmp_path) == ["best-00000000"]


def test_training_scalars_are_averaged_once():
    state = TrainState()
    state.add_train({"loss": 1.0, "mse": 4.0})
    state.add_train({"loss": 3.0})
    # "mse" came in one of two updates: the means are over all of them
    assert state.take_train() == {"loss": 2.0, "mse": 2.0}
    assert state.take_train() == {}


@pytest.mark.parametrize(("patience", "stops"), [(2, True), (3, False), (None, False)])
def test_evaluations_without_gain_are_counted_from_the_best_one(patience, stops):
    state = TrainState()
    gains = []
    for state.step, metric in enumerate([5.0, 6.0, 4.0, 4.0, 7.0]):
        assert not state.stopped_early
        gains.append(state.evaluated(metric, patience))
    assert gains == [True, False, True, False, False]
    assert (state.best_step, state.best_metric) == (2, 4.0)
    assert state.stopped_early == stops


def test_state_survives_the_text_form_before_the_first_evaluation():
    state = TrainState(step=2, train_sums={"loss": 1.0}, train_updates=2)
    assert TrainState(**json.loads(json.dumps(asdict(state)))) == state
