"""The clock of a run."""

from __future__ import annotations

from lolcats.phases import Phases


def test_every_second_belongs_to_one_phase():
    times = iter([10.0, 11.0, 14.0, 14.5, 20.0])
    phases = Phases(2.0, clock=lambda: next(times))
    for name in ("model", "perplexity", "data", "perplexity"):
        phases.begin(name)
    assert phases.seconds == {"start": 3.0, "model": 3.0, "perplexity": 0.5, "data": 5.5}
