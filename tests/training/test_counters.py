from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from lolcats.training.counters import Counters


def test_training_scalars_are_averaged_once():
    counters = Counters()
    counters.add_train({"loss": 1.0, "mse": 4.0})
    counters.add_train({"loss": 3.0})
    # "mse" came in one of two updates: the means are over all of them
    assert counters.take_train() == {"loss": 2.0, "mse": 2.0}
    assert counters.take_train() == {}
    counters.add_train({"loss": 5.0})
    assert counters.take_train() == {"loss": 5.0}


@pytest.mark.parametrize(("patience", "stops"), [(2, True), (3, False), (None, False)])
def test_evaluations_without_gain_are_counted_from_the_best_one(patience, stops):
    counters = Counters()
    gains = []
    for counters.step, metric in enumerate([5.0, 6.0, 4.0, 4.0, 7.0]):
        assert not counters.stopped_early
        gains.append(counters.evaluated(metric, patience))
    assert gains == [True, False, True, False, False]
    assert (counters.best_step, counters.best_metric) == (2, 4.0)
    assert counters.stopped_early == stops


def test_speed_is_of_the_updates_alone():
    counters = Counters(step=3, tokens=600, seconds=8.0, update_seconds=2.0)
    result = counters.result()
    assert (result.steps, result.seconds, result.tokens_per_second) == (3, 8.0, 300.0)


def test_survives_the_text_form_before_the_first_evaluation():
    counters = Counters(step=2, train_sums={"loss": 1.0}, train_updates=2)
    assert Counters(**json.loads(json.dumps(asdict(counters)))) == counters
