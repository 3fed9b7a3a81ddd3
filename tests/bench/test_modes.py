"""benchmarks/modes_smollm2.py: what it runs, and what it keeps of it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("modes_smollm2")
    del sys.modules["modes_smollm2"]


@pytest.fixture
def execute(script, model_dir, data_file, tmp_path, monkeypatch):
    def run(*options):
        file = tmp_path / "modes.json"
        given = ["--model", model_dir, "--data", data_file, "--work", tmp_path / "work", "--json", file, *options]
        monkeypatch.setattr(sys, "argv", ["modes_smollm2.py", *map(str, given)])
        script.main()
        return json.loads(file.read_text())["rows"]

    return run


def test_every_mode_on_the_numbers_of_gpus_that_it_is_for(script, execute, monkeypatch):
    ran = []

    def run(command, *, env, **_):
        config = script.LinearizeConfig.from_dict(script.load_recipe(command[command.index("--recipe") + 1]))
        processes = command[command.index("--nproc-per-node") + 1] if "--nproc-per-node" in command else "1"
        ran.append((config.transfer.block_mode, config.parallel.shard, processes, env["CUDA_VISIBLE_DEVICES"]))
        raise script.subprocess.SubprocessError("no GPU")

    monkeypatch.setattr(script.subprocess, "run", run)
    rows = execute("--gpus", 1, 2)
    assert ran == [
        ("joint", "auto", "1", "0"),
        ("streaming", "auto", "1", "0"),
        ("pipelined", "auto", "2", "0,1"),
        ("joint", "off", "2", "0,1"),
        ("joint", "on", "2", "0,1"),
    ]
    assert [row["error"] for row in rows] == ["no GPU"] * 5


def test_a_run_leaves_its_numbers(execute, capsys):
    small = [
        "attention.feature_dim=8",
        "data.sequence_length=48",
        "data.validation_rows=10",
        "transfer.max_steps=1",
        "adjust.max_steps=1",
    ]
    options = [part for setting in small for part in ("--set", setting)]
    row = execute("--modes", "streaming", "--device", "cpu", *options)[0]
    assert "error" not in row, row
    assert row["perplexity"].keys() >= {"transfer", "adjust"}
    assert row["stages"]["transfer"]["steps"] == row["stages"]["adjust"]["steps"] == 1
    assert row["config"]["transfer"]["block_mode"] == "streaming"
    assert f"{row['perplexity']['adjust']:.3f}" in capsys.readouterr().out
