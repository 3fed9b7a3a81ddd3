"""The plan against result files of benchmarks/scaling.py."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from lolcats.bench.scaling import ScalingBench
from lolcats.bench.train import TrainBench
from lolcats.config import AdjustSection
from lolcats.plan.check_scaling import read_scaling, scaling_markdown
from lolcats.plan.gpus import find_gpu
from lolcats.plan.modes import all_modes
from lolcats.plan.request import Request
from lolcats.plan.shape import model_shape


def write(folder, bench, processes, rows, name="scaling.json"):
    """A file as benchmarks/scaling.py writes it."""
    settings = asdict(bench)
    settings["train"]["attention"] = bench.train.attention.model_dump(mode="json")
    report = {
        "settings": settings,
        "processes": processes,
        "provenance": {"device": "NVIDIA H200"},
        "rows": [{"row": stage, "micro_batch": 2, "tokens": 1024} | row for stage, row in rows.items()],
    }
    path = folder / name
    path.write_text(json.dumps(report))
    return path


def test_a_sharded_run_is_held_against_the_sharded_plan(tmp_path):
    bench = ScalingBench(TrainBench(model="smollm2-135m", gradient_checkpointing=True))
    numbers = {"tokens_per_second": 1e6, "peak_gib": [1.0, 2.0]}
    transfer, adjust = read_scaling([write(tmp_path, bench, 2, {"transfer": numbers, "adjust": numbers})])
    request = Request(find_gpu("h200"), gpus=2, batch_size=4, micro_batch_size=2)
    shape = model_shape("smollm2-135m", bench.train.attention, AdjustSection(lora_rank=8))
    plans = {(plan.mode, plan.options): plan for plan in all_modes(shape, request)}
    assert transfer.plan == plans["sharded", ()]
    assert adjust.plan == plans["lora-sharded", ("gradient checkpointing",)]
    assert transfer.peak_bytes == 2 * 2**30
    line = scaling_markdown([transfer]).splitlines()[-1].split(" | ")
    assert line[:5] == ["| smollm2-135m", "transfer", "2", "2", "2.1"]
    memory = transfer.plan.memory.total
    assert line[5:7] == [f"{memory / 1e9:.1f}", f"{memory / 2**31 - 1:+.0%}"]
    assert line[-1] == f"{2e7 / 1e6 / 3600:.2f} |"


def test_a_block_on_one_gpu(tmp_path):
    bench = ScalingBench(TrainBench(model="llama3-405b"), layers=9)
    row = {"tokens_per_second": 1000.0, "peak_gib": [70.0]}
    found = read_scaling([write(tmp_path, bench, 1, {"transfer": row})])[0]
    weights = 9 * (2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248) + 2 * 128256 * 16384
    assert found.plan.mode == "joint"
    assert found.plan.memory.weights == pytest.approx(2 * weights, rel=1e-3)
    assert "| llama3-405b, 9 layers | transfer | 1 |" in scaling_markdown([found])


def test_what_is_not_planned_for_has_empty_cells(tmp_path):
    bench = ScalingBench(TrainBench(model="smollm2-135m", gradient_checkpointing=True), sharded=False)
    row = {"tokens_per_second": 1000.0, "peak_gib": [1.0, 1.0]}
    found = read_scaling([write(tmp_path, bench, 2, {"adjust": row})])[0]
    assert found.plan is None
    assert scaling_markdown([found]).splitlines()[-1].count("|  |") == 2


def test_rows_that_failed_are_left_out(tmp_path):
    bench = ScalingBench(TrainBench(model="smollm2-135m"))
    assert read_scaling([write(tmp_path, bench, 1, {"transfer": {"error": "out of memory"}})]) == []
