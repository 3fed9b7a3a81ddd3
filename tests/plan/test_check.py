"""The plan against the measured runs in benchmarks/results."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from lolcats.plan.check import (
    markdown,
    planned_bytes,
    planned_tokens_per_second,
    read_runs,
    read_whole_runs,
    throughput_rows,
)
from lolcats.plan.memory import TUNING
from lolcats.plan.throughput import measured

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "results").glob("train_*.json"))


@pytest.fixture(scope="module")
def runs():
    return read_runs(FILES)


def test_peak_memory_of_measured_runs(runs):
    deviations = {}
    for run in runs:
        if run.stage != "frozen":
            planned = planned_bytes(run)
            # Kernels that an earlier run has tuned need no buffer for it.
            plans = [planned, planned - TUNING] if run.stage == "transfer" else [planned]
            name = f"{run.source} {run.micro_batch}"
            deviations[name] = min((plan / run.peak_bytes - 1 for plan in plans), key=abs)
    assert len(deviations) >= 8
    assert {name: value for name, value in deviations.items() if abs(value) > 0.1} == {}


def test_the_table_in_the_package_is_that_of_the_results(runs):
    assert list(measured()) == throughput_rows(runs)


def test_measured_speeds_come_out_as_they_went_in(runs):
    for run in runs:
        assert planned_tokens_per_second(run, measured()) == pytest.approx(run.tokens_per_second, rel=1e-3)


def test_markdown_has_a_row_for_every_run(runs):
    assert len(markdown(runs, measured()).splitlines()) == len(runs) + 2


def test_whole_runs_are_a_check_of_their_own(runs):
    files = sorted((ROOT / "benchmarks" / "results").glob("quality_smollm2_*_kernels.json"))
    whole = read_whole_runs(files, "smollm2-135m")
    assert {run.stage for run in whole} == {"transfer", "adjust"}
    assert throughput_rows([*runs, *whole]) == throughput_rows(runs)
    default = [run for run in whole if run.source.endswith("kv_head")]
    for run in default:
        assert planned_tokens_per_second(run, measured()) == pytest.approx(run.tokens_per_second, rel=0.1)
    assert "kv_head, whole run" in markdown(default, measured())


def smallest(folder: Path, **changes: object) -> Path:
    """A copy of the smallest model's file, with changes to its first row."""
    source = next(path for path in FILES if "smollm2" in path.name)
    report = json.loads(source.read_text())
    report["rows"][0] |= changes
    path = folder / source.name
    path.write_text(json.dumps(report))
    return path


def test_the_script_writes_into_a_page(runs, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    ends = "<!-- /plan_check -->\nb\n<!-- plan_scaling -->\n{}\n<!-- /plan_scaling -->\n"
    page.write_text("a\n<!-- plan_check -->\nold\n" + ends.format("old"))
    smallest(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plan_check.py", "--results", str(tmp_path), "--into", str(page)])
    runpy.run_path(str(ROOT / "benchmarks" / "plan_check.py"), run_name="__main__")
    own = [run for run in runs if "smollm2" in run.source]
    table = markdown(own, measured())
    assert page.read_text() == f"a\n<!-- plan_check -->\n{table}\n" + ends.format("*not measured*")


def test_rows_that_failed_are_left_out(runs, tmp_path):
    found = read_runs([smallest(tmp_path, error="OutOfMemoryError")])
    assert len(found) == sum("smollm2" in run.source for run in runs) - 1
