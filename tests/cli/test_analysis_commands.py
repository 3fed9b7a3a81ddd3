"""analyse, report and sweep: what reaches the functions behind them, and what is printed."""

from __future__ import annotations

import json

import pytest

from lolcats.sweeps import list_sweeps


@pytest.fixture
def sweep_calls(monkeypatch):
    """Arguments of each `run_sweep`; `calls.result` is what it returns."""

    class Calls(list):
        result = [{"status": "finished"}]

    calls = Calls()

    def run_sweep(sweep, runs, folder, **options):
        calls.append((sweep, runs, folder, options))
        return calls.result

    monkeypatch.setattr("lolcats.sweep.runner.run_sweep", run_sweep)
    return calls


def test_sweep_hands_its_options_on(cli, sweep_calls, tmp_path):
    result = cli(
        "sweep",
        "transfer-steps",
        *("--model", "a/b", "--data", "x.jsonl,max_rows=9", "--path", "text=own.txt"),
        *("--set", "adjust.lr=0.5", "--seed", 4, "--seed", 5, "--drop-weights", "-o", tmp_path),
    )
    assert result.exit_code == 0, result.output
    ((sweep, runs, folder, options),) = sweep_calls
    assert len(runs) == 20
    config = runs[0].config
    assert (config.model.path, config.adjust.lr, config.data.sources[0].max_rows) == ("a/b", 0.5, 9)
    assert {run.seed for run in runs} == {4, 5}
    assert sweep.held_out["text"].path == "own.txt"
    assert folder == tmp_path
    assert options["drop_weights"] is True
    sweep_calls.result = [{"status": "failed"}]
    assert cli("sweep", "blocks", "-o", tmp_path).exit_code == 1
    assert all(name in cli("sweep").stdout for name in list_sweeps())


def test_sweep_prints_its_commands(cli, sweep_calls, tmp_path):
    result = cli("sweep", "lora-rank", "--print", "--model", "m", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == 8
    assert lines[0].startswith("lolcats linearize --recipe smollm2-135m-paper --set ")
    assert all(" --set model.path=m " in line for line in lines)
    assert all(line.endswith(f"--transfer-from {tmp_path}/4-seed0") for line in lines[1:])
    assert sweep_calls == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["blocks"], "give --output"),
        (["nothing"], "no sweep named 'nothing'"),
        (["absent.yaml"], "cannot read absent.yaml"),
        (["data"], "--path textbooks=FILE"),
        (["data", "--path", "textbooks"], "expected NAME=PATH"),
    ],
)
def test_sweep_mistakes(cli, sweep_calls, arguments, message):
    result = cli("sweep", *arguments)
    assert (result.exit_code, sweep_calls) == (1, [])
    assert message in result.stderr


def test_analyse(cli, replace_module, monkeypatch, tmp_path):
    seen = {}

    def analyse(folder, data, *, report, **options):
        seen.update(options, folder=folder, data=data)
        return {
            "notes": ["something is missing"],
            "stages": ["swapped", "transfer"],
            "layers": [3, 7],
            "mse": {"swapped": [0.5, 0.25], "transfer": [0.125, 0.0625]},
            "error_by_position": {
                "positions": [[0, 0], [1, 1], [2, 3]],
                "relative": {"swapped": [[0.0, 0.5, 1.0]] * 2, "transfer": [[0.0, 0.1, 0.2], [0.0, 0.3, 0.7]]},
            },
            "linear_share": {"share": {"swapped": [0.1, 0.2], "transfer": [0.25, 0.75]}},
            "ablations": {"full": 8.5, "window_only": None},
        }

    replace_module("lolcats.analysis.analyse", analyse=analyse)
    arguments = ["--data", "demo,max_rows=3", "--max-sequences", 5, "--batch-size", 2]
    result = cli("analyse", tmp_path, *arguments)
    assert result.exit_code == 0, result.output
    assert (seen["folder"], seen["batch_size"]) == (tmp_path, 2)
    assert (seen["data"].sources[0].max_rows, seen["data"].validation_sequences) == (3, 5)
    for wanted in ("0.0625", "75.0%", "full 8.500", "2-3", "45.0%"):
        assert wanted in result.stdout
    assert "window_only" not in result.stdout
    assert "something is missing" in result.stderr


def test_report(cli, tmp_path):
    result = cli("report", tmp_path)
    assert result.exit_code == 1
    assert "has no lolcats_report.json" in result.stderr
    (tmp_path / "lolcats_report.json").write_text(
        json.dumps({"base_model": "a/b", "perplexity": {"teacher": 7.25}, "stages": {}})
    )
    assert cli("report", tmp_path).exit_code == 0
    assert "7.250" in (tmp_path / "report.html").read_text()
    assert cli("report", tmp_path, "-o", tmp_path / "sub" / "page.html").exit_code == 0
    assert (tmp_path / "sub" / "page.html").is_file()
