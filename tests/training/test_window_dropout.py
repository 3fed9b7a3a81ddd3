"""Which updates have a smaller window, and that nothing else changes."""

from __future__ import annotations

import random

import pytest
import torch
from toy_stage import copy_weights, equal_weights

from lolcats.modeling.layer import HybridAttention
from lolcats.ops import HybridSpec
from lolcats.training.loop import train
from lolcats.training.window_dropout import drops_window, narrow_windows

DROPPED = next(update for update in range(20) if drops_window(0.5, update=update, seed=0))
KEPT = next(update for update in range(20) if not drops_window(0.5, update=update, seed=0))


class Killed(BaseException):
    """Stands for the end of the process."""


def choices(probability, seed=0, updates=2000):
    return [drops_window(probability, update=update, seed=seed) for update in range(updates)]


def test_the_choice_is_a_function_of_update_and_seed():
    assert not any(choices(0.0))
    first = choices(0.3)
    assert 0.26 < sum(first) / len(first) < 0.34  # four standard deviations
    state = random.getstate()
    random.seed(5)
    assert choices(0.3) == first
    random.setstate(state)
    assert choices(0.3, seed=1) != first
    # what runs that are being resumed rely on
    assert "".join(str(int(choice)) for choice in choices(0.5, updates=16)) == "1011010010110001"


def test_windows_come_back_after_the_block():
    layer = HybridAttention(HybridSpec("sliding", 4, sinks=1), 2, 1, 8)
    before = layer.spec
    with narrow_windows([layer], 2):
        assert layer.spec == HybridSpec("sliding", 2, sinks=1)
    assert layer.spec is before
    with pytest.raises(Killed), narrow_windows([layer], 2):
        raise Killed
    assert layer.spec is before


@pytest.mark.parametrize("size", [0, 2])
def test_a_dropped_update_is_that_of_a_smaller_window(transfer_stage, gradients, size):
    dropping, data = transfer_stage(window_dropout=0.5, window_dropout_size=size)
    small, _ = transfer_stage({"window_size": size})
    batch = data.batch(range(2))
    dropping.begin_update(DROPPED, 0)
    found = dropping.micro_step(batch, 1.0)
    assert torch.equal(found["loss"], small.micro_step(batch, 1.0)["loss"])
    expected = gradients(small)
    for name, gradient in gradients(dropping).items():
        if expected[name] is None:  # without a window there is nothing for its factor to learn
            assert size == 0
            assert gradient is None
        else:
            assert torch.equal(gradient, expected[name])


def test_other_updates_and_evaluations_keep_the_window(transfer_stage):
    dropping, data = transfer_stage(window_dropout=0.5)
    plain, _ = transfer_stage()
    batch = data.batch(range(2))
    for stage in (dropping, plain):
        stage.begin_update(KEPT, 0)
    assert torch.equal(dropping.micro_step(batch, 1.0)["loss"], plain.micro_step(batch, 1.0)["loss"])
    for stage in (dropping, plain):
        stage.begin_update(DROPPED, 0)
    assert dropping.evaluate() == plain.evaluate()
    assert not torch.isclose(dropping.micro_step(batch, 1.0)["loss"], plain.micro_step(batch, 1.0)["loss"])


def test_graphs_tell_both_kinds_of_updates_apart(transfer_stage, monkeypatch):
    """`GraphedStep` captures one graph for every set of constants."""
    stage, data = transfer_stage(window_dropout=0.5)
    constants, step = [], stage.step

    def recorded(inputs, **given):
        constants.append(given)
        return step(inputs, **given)

    monkeypatch.setattr(stage, "step", recorded)
    for update in (KEPT, DROPPED):
        stage.begin_update(update, 0)
        stage.micro_step(data.batch(range(2)), 0.5)
    assert constants == [{"scale": 0.5}, {"scale": 0.5, "drop_window": True}]


def test_resumed_run_equals_the_unbroken_one(transfer_stage, tmp_path):
    settings = {"lr": 1e-2, "max_steps": 8, "eval_every": 4, "checkpoint_every": 2, "micro_batch_size": 1}

    def run(name, dies_at=None, resume=False, **options):
        stage, data = transfer_stage(**settings, **options)
        step, left = stage.micro_step, dies_at

        def micro_step(batch, scale):
            nonlocal left
            if left is not None:
                left -= 1
                if left < 0:
                    raise Killed
            return step(batch, scale)

        stage.micro_step = micro_step
        result = train(stage, data, stage.config, seed=0, directory=tmp_path / name, resume=resume)
        return copy_weights(stage), [entry["loss"] for entry in result.history]

    assert len({drops_window(0.5, update=update, seed=0) for update in range(4, 8)}) == 2  # after resuming
    unbroken = run("unbroken", window_dropout=0.5)
    with pytest.raises(Killed):
        run("broken", dies_at=11, window_dropout=0.5)
    random.seed(9)
    resumed = run("broken", resume=True, window_dropout=0.5)
    assert equal_weights(resumed[0], unbroken[0])
    assert resumed[1] == unbroken[1]
    assert not equal_weights(run("never")[0], unbroken[0])
