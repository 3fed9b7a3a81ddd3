"""Time and memory by length of a tiny run."""

from __future__ import annotations

import pytest

from lolcats.analysis.charts import cost_charts
from lolcats.analysis.speed import speed_by_length
from lolcats.analysis.stages import load_stages


@pytest.fixture
def model(finished):
    return load_stages(finished)[0].model


def test_both_are_measured(model):
    found = speed_by_length(model, (8, 32, 10**6))
    assert [row["tokens"] for row in found["rows"]] == [8, 32]
    assert found["left_out"] == [10**6]  # beyond the model's positions
    for row in found["rows"]:
        assert all(row[name][key] > 0 for name in ("linear", "softmax") for key in ("prompt_s", "step_ms"))
    first, last = ({name: row[name]["cache_bytes"] for name in ("linear", "softmax")} for row in found["rows"])
    assert last["softmax"] == 4 * first["softmax"]
    assert last["linear"] == first["linear"]
    titles = [chart.title for chart in cost_charts({"speed": found})]
    assert titles == ["Time of a prompt by length", "Time of a new token by length", "Memory of a sequence by length"]


def test_without_time_nothing_is_measured(model):
    found = speed_by_length(model, (8, 32), budget_s=0.0)
    assert (found["rows"], found["left_out"]) == ([], [8, 32])
    assert cost_charts({"speed": found}) == []
