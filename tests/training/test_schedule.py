from __future__ import annotations

import math

import pytest
from toy_stage import toy_config

from lolcats.errors import UserError
from lolcats.training.schedule import Schedule


def rates(updates=10, plateau_lr=0.5, **changes):
    schedule = Schedule(toy_config(**{"lr": 1.0, "min_lr": 0.0, **changes}), updates)
    return [schedule.lr(update, plateau_lr) for update in range(updates)]


def test_without_warm_up_nothing_changes():
    assert rates(schedule="constant") == [1.0] * 10
    assert rates(schedule="plateau") == [0.5] * 10
    cosine = [0.1 + 0.9 * (0.5 * (1.0 + math.cos(math.pi * min(update / 7, 1.0)))) for update in range(7)]
    assert rates(7, schedule="cosine", min_lr=0.1) == cosine  # bit for bit


@pytest.mark.parametrize(("schedule", "after"), [("constant", 1.0), ("plateau", 0.5), ("cosine", None), ("wsd", None)])
def test_warm_up_is_a_straight_line_to_the_rate_after_it(schedule, after):
    found = rates(schedule=schedule, warmup_steps=4)
    top = found[4]
    assert found[:4] == pytest.approx([top / 4, top / 2, top * 3 / 4, top])
    assert top == (1.0 if after is None else after)
    if after is not None:
        assert found[4:] == [after] * 6


def test_cosine_falls_over_the_updates_after_warm_up():
    assert rates(12, schedule="cosine", warmup_steps=4)[4:] == pytest.approx(rates(8, schedule="cosine"))


def test_wsd_holds_and_then_falls_in_a_straight_line():
    assert rates(schedule="wsd", decay_share=0.4, min_lr=0.2) == pytest.approx([1.0] * 7 + [0.8, 0.6, 0.4])
    assert rates(schedule="wsd", decay_share=0.01) == [1.0] * 10  # one update falls, from the full rate
    with_warm_up = rates(schedule="wsd", decay_share=1.0, warmup_steps=6)
    assert with_warm_up[5:] == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.25])  # falling begins after warm-up


def test_the_floor_is_never_above_the_rate():
    assert rates(schedule="wsd", decay_share=0.5, lr=1e-3, min_lr=1.0) == pytest.approx([1e-3] * 10)


def test_warm_up_over_the_whole_stage_is_refused():
    with pytest.raises(UserError, match="warmup_steps=10 is not less than the 10 updates"):
        rates(warmup_steps=10)
    rates(warmup_steps=9)
