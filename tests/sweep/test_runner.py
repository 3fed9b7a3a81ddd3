"""Sweeps of real runs on a tiny model, and of pretended ones for what goes wrong."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file
from torch import equal
from typer.testing import CliRunner

from lolcats.cli.app import app
from lolcats.errors import UserError
from lolcats.sweep.runner import RESULTS_FILE, Worker, planned, run_sweep, table_cells
from lolcats.sweep.spec import read_sweep

QUIET = Console(quiet=True)


def in_process(words, log, environment):
    result = CliRunner().invoke(app, words[1:])
    with log.open("a") as stream:
        stream.write(result.output)
    return result.exit_code


def test_a_real_sweep(sweep_file, tmp_path):
    sweep, runs = read_sweep(sweep_file)
    folder = tmp_path / "out"
    rows = run_sweep(sweep, runs, folder, console=QUIET, execute=in_process)
    logs = "".join((folder / f"{run.name}.log").read_text() for run in runs)
    assert [row["status"] for row in rows] == ["finished"] * 2, logs
    assert [json.loads(line) for line in (folder / RESULTS_FILE).read_text().splitlines()] == rows
    # Stage 1 does not depend on the rank: the second run takes it from the first.
    second = planned(sweep, runs, folder)["lora_rank_4-seed0"][0]
    assert second[-2:] == ["--transfer-from", str(folder / "lora_rank_2-seed0")]
    assert rows[0]["perplexity"]["transfer"] == rows[1]["perplexity"]["transfer"]
    assert rows[0]["stages"]["transfer"]["seconds"] == rows[1]["stages"]["transfer"]["seconds"]
    assert all(row["held_out"]["own"] > 0 for row in rows)
    table = (folder / "table.md").read_text()
    assert "perplexity adjust" in table
    assert "perplexity on own" in table
    # The weights are those of a run that trains its own stage 1.
    words = [*second[1:-2], "-o", str(tmp_path / "alone")]
    assert CliRunner().invoke(app, words).exit_code == 0
    shared, alone = (load_file(path / "model.safetensors") for path in (folder / runs[1].name, tmp_path / "alone"))
    assert all(equal(value, alone[name]) for name, value in shared.items())

    def never(words, log, environment):
        raise AssertionError("finished runs are skipped")

    assert run_sweep(sweep, runs, folder, console=QUIET, execute=never) == rows
    _, changed = read_sweep(sweep_file, overrides=["transfer.lr=0.5"])
    with pytest.raises(UserError, match="finished run with other settings"):
        run_sweep(sweep, changed, folder, console=QUIET, execute=never)


class Pretended:
    """Writes reports instead of training; runs named in `failing` end with status 3."""

    def __init__(self, failing=()):
        self.failing, self.begun, self.lock = set(failing), [], threading.Lock()

    def __call__(self, words, log, environment):
        if words[1] == "linearize":
            output = Path(words[words.index("-o") + 1])
            with self.lock:
                self.begun.append(output.name)
            if output.name in self.failing:
                return 3
            output.mkdir(parents=True, exist_ok=True)
            (output / "model.safetensors").write_bytes(b"x")
            report = {"perplexity": {"teacher": 2.0, "adjust": float(len(output.name))}, "stages": {}}
            (output / "lolcats_report.json").write_text(json.dumps(report))
        elif words[1] == "perplexity":
            Path(words[words.index("--output") + 1]).write_text(json.dumps([{"perplexity": 4.0}]))
        return 0


def test_a_failed_run_is_a_row_and_is_tried_again(sweep_file, tmp_path):
    sweep, runs = read_sweep(sweep_file, seeds=[0, 1])
    execute = Pretended(failing=["lora_rank_4-seed1"])
    rows = run_sweep(sweep, runs, tmp_path / "out", workers=2, console=QUIET, execute=execute)
    assert [row["status"] for row in rows] == ["finished", "finished", "finished", "failed"]
    assert "`lolcats linearize` ended with status 3; see" in rows[-1]["error"]
    # A run whose stage 1 another one trains begins after it.
    assert execute.begun.index("lora_rank_2-seed0") < execute.begun.index("lora_rank_4-seed0")
    head, lines = table_cells(rows)
    assert head == ["adjust.lora_rank", "seeds", "perplexity teacher", "perplexity adjust", "perplexity on own"]
    assert lines[0] == ["2", "2", "2.000\u00a0±\u00a00.000", "17.000\u00a0±\u00a00.000", "4.000\u00a0±\u00a00.000"]
    assert lines[1] == ["4", "1 (1 failed)", "2.000", "17.000", "4.000"]
    again = Pretended()
    rows = run_sweep(sweep, runs, tmp_path / "out", drop_weights=True, console=QUIET, execute=again)
    weights = [file.parent.name for file in (tmp_path / "out").glob("*/model*")]
    assert "lora_rank_4-seed1" not in weights
    assert len(weights) == 3
    assert again.begun == ["lora_rank_4-seed1"]
    assert {row["status"] for row in rows} == {"finished"}


def test_runs_have_gpus_of_their_own(sweep_file, tmp_path, monkeypatch):
    monkeypatch.setattr("lolcats.sweep.runner.visible_gpus", lambda: ["3", "5"])
    sweep, runs = read_sweep(sweep_file, seeds=[0, 1], overrides=["transfer.enabled=false"])
    both, seen = threading.Barrier(2, timeout=30), []
    pretended = Pretended()

    def execute(words, log, environment):
        if words[1] == "linearize":
            seen.append(environment["CUDA_VISIBLE_DEVICES"])
            both.wait()  # two at a time
        return pretended(words, log, environment)

    run_sweep(sweep, runs, tmp_path / "out", workers=2, console=QUIET, execute=execute)
    assert sorted(seen) == ["3", "3", "5", "5"]


def test_a_worker_runs_commands_in_one_process_until_it_dies(tmp_path):
    worker, log = Worker({}), tmp_path / "log"
    assert worker(["lolcats", "recipes"], log) == 0
    process = worker.process
    assert worker(["lolcats", "recipes", "show", "absent"], log) != 0
    assert worker(["lolcats", "no-such-command"], log) != 0
    assert worker.process is process
    text = log.read_text()
    assert text.index("lolcats-linear") < text.index("$ lolcats recipes show absent") < text.index("error:")
    assert worker(["lolcats", "recipes"], tmp_path / "no folder" / "log") != 0  # of which it dies
    assert process.poll() is not None
    assert worker(["lolcats", "recipes"], log) == 0
    worker.close()
    assert worker.process.returncode == 0
