"""The scaling benchmark in one process; several are started in tests/parallel."""

from __future__ import annotations

import dataclasses
import json

from rich.console import Console

from lolcats.bench.scaling import ScalingBench, build_sharded, run
from lolcats.bench.train import TrainBench
from lolcats.parallel.group import SINGLE

TINY = ScalingBench(
    TrainBench(model="tiny", rows=("transfer", "adjust"), micro_batches=(1,), tokens=16, device="cpu", dtype="float32"),
    layers=1,
    seconds=0.05,
)


def test_both_stages_are_measured():
    report = json.loads(json.dumps(run(TINY, SINGLE, Console(quiet=True))))
    assert [row["row"] for row in report["rows"]] == ["transfer", "adjust"]
    for row in report["rows"]:
        assert row["steps"] >= 3
        assert row["tokens_per_second"] > 0
        assert row["peak_gib"] == [None]  # no GPU
    assert report["processes"] == 1


def test_layers_are_cut_and_all_weights_are_made():
    model = build_sharded(TINY, SINGLE)
    assert len(list(model.linear_layers())) == 1
    assert not any(parameter.is_meta for parameter in model.parameters())
    whole = build_sharded(dataclasses.replace(TINY, layers=None), SINGLE)
    assert len(list(whole.linear_layers())) == 2
