"""A sweep of real runs on a tiny model, and one of pretended runs for what goes wrong."""

from __future__ import annotations

import json
import math

import pytest
from rich.console import Console
from safetensors.torch import load_file
from torch import equal

from lolcats.errors import UserError
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.pipeline import linearize
from lolcats.sweep.results import RESULTS_FILE, flatten, read_rows, write_tables
from lolcats.sweep.runner import run_sweep
from lolcats.sweep.spec import Evaluate, read_sweep

QUIET = Console(quiet=True)


def test_a_real_sweep(sweep_file, tmp_path):
    sweep, runs = read_sweep(sweep_file)
    folder = tmp_path / "out"
    entries = run_sweep(sweep, runs, folder, console=QUIET)
    rows = {row["run"]: row for row in read_rows(folder / RESULTS_FILE)}
    assert set(rows) == {run.name for run in runs}
    assert {row["status"] for row in rows.values()} == {"finished"}
    # Stage 1 depends on the seed, not on the rank: the second rank takes it from the first.
    assert {name: row["transfer_from"] for name, row in rows.items() if row["transfer_from"]} == {
        f"lora_rank_4-seed{seed}": f"lora_rank_2-seed{seed}" for seed in (0, 1)
    }
    for row in rows.values():
        report = json.loads((folder / row["run"] / "lolcats_report.json").read_text())
        assert row["perplexity"] == report["perplexity"]
        # the validation split, without the incomplete last sequence that is filled up here
        assert row["held_out"]["own"] == pytest.approx(row["perplexity"]["adjust"], rel=0.2)
    entry = entries[0]
    assert entry["case"] == {"adjust.lora_rank": "2"}
    values = [rows[f"lora_rank_2-seed{seed}"]["perplexity"]["adjust"] for seed in (0, 1)]
    summary = entry["metrics"]["perplexity adjust"]
    assert summary["mean"] == pytest.approx(sum(values) / 2)
    assert summary["std"] == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
    table = (folder / "table.md").read_text().splitlines()
    assert table[0].startswith("| adjust.lora_rank | seeds | perplexity teacher |")
    assert len(table) == 2 + 2
    assert f"{summary['mean']:.3f} ± {summary['std']:.3f}" in table[2].replace("\u00a0", " ")
    assert json.loads((folder / "table.json").read_text()) == entries


def test_a_shared_stage_1_changes_nothing(sweep_file, tmp_path):
    sweep, runs = read_sweep(sweep_file, seeds=[0])
    run_sweep(sweep, runs, tmp_path / "out", console=QUIET)
    assert read_rows(tmp_path / "out" / RESULTS_FILE)[1]["transfer_from"] == runs[0].name
    alone = tmp_path / "alone"
    linearize(runs[1].config, alone, console=QUIET)
    shared = load_file(tmp_path / "out" / runs[1].name / "model.safetensors")
    for name, tensor in load_file(alone / "model.safetensors").items():
        assert equal(shared[name], tensor), name


def pretend(calls, fail=()):
    """An `execute` that writes down what it ran, and fails where told."""

    def execute(run, output, console):
        calls.append(run.name)
        if run.name in fail:
            raise RuntimeError(f"no luck with {run.name}")
        output.mkdir(parents=True, exist_ok=True)
        (output / "lolcats_report.json").write_text("{}")
        (output / "model.safetensors").write_text("heavy")
        (output / "run" / "adjust").mkdir(parents=True)
        number = run.seed + run.config.adjust.lora_rank
        return {"perplexity": {"teacher": 2.0, "adjust": float(number)}, "stages": {}}

    return execute


@pytest.fixture
def pretended(sweep_file):
    sweep, runs = read_sweep(sweep_file, overrides=["attention.sinks=1"])
    return sweep.model_copy(update={"held_out": {}}), runs


def test_failures_are_recorded_and_tried_again(pretended, tmp_path):
    sweep, runs = pretended
    calls, bad = [], runs[1].name
    entries = run_sweep(sweep, runs, tmp_path, console=QUIET, execute=pretend(calls, fail=[bad]))
    assert calls == [run.name for run in runs]  # the others ran all the same
    row = next(row for row in read_rows(tmp_path / RESULTS_FILE) if row["run"] == bad)
    assert (row["status"], row["error"]) == ("failed", f"RuntimeError: no luck with {bad}")
    assert "Traceback" in (tmp_path / bad / "error.txt").read_text()
    assert entries[0]["failed"] == [{"seed": 1, "error": row["error"]}]
    assert entries[0]["metrics"]["perplexity adjust"] == {"mean": 2.0, "std": None, "count": 1, "values": [2.0]}
    assert "1 (1 failed)" in (tmp_path / "table.md").read_text()

    calls.clear()
    entries = run_sweep(sweep, runs, tmp_path, console=QUIET, execute=pretend(calls))
    assert calls == [bad]
    assert len(read_rows(tmp_path / RESULTS_FILE)) == len(runs)
    assert entries[0]["failed"] == []
    assert entries[0]["seeds"] == [0, 1]
    assert entries[0]["metrics"]["perplexity adjust"]["values"] == [2.0, 3.0]
    assert not (tmp_path / bad / "error.txt").exists()


def test_an_interrupted_sweep_goes_on(pretended, tmp_path):
    sweep, runs = pretended
    calls = []

    def interrupted(run, output, console):
        if len(calls) == 3:
            raise KeyboardInterrupt
        return pretend(calls)(run, output, console)

    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, runs, tmp_path, console=QUIET, execute=interrupted)
    assert len(read_rows(tmp_path / RESULTS_FILE)) == 3
    run_sweep(sweep, runs, tmp_path, console=QUIET, execute=pretend(calls))
    assert calls == [run.name for run in runs]


def test_evaluations_join_the_table(pretended, tmp_path):
    sweep, runs = pretended
    run_sweep(sweep, runs, tmp_path, console=QUIET, execute=pretend([]))
    for run in runs:
        rows = [
            {"model": name, "tasks": {"piqa": {"value": value, "stderr": 0.01}}}
            for name, value in (("teacher", 0.9), (f"somewhere/{run.name}/", 0.5 + run.seed / 10), ("another", 0.1))
        ]
        (tmp_path / run.name / "eval.json").write_text(json.dumps({"models": rows, "settings": {"limit": 5}}))
    calls = []
    entries = run_sweep(sweep, runs, tmp_path, console=QUIET, execute=pretend(calls))
    assert calls == []
    assert entries[0]["metrics"]["tasks piqa"]["mean"] == pytest.approx(0.55)
    assert "tasks piqa" in (tmp_path / "table.md").read_text()
    assert flatten({"a": {"b": 1, "c": "x", "d": True, "e": [2]}}) == {"a b": 1.0}


def test_evaluations_are_part_of_a_run(sweep_file, tmp_path, monkeypatch):
    # The tiny tokenizer knows no digits, so that any answer counts: only the way of the numbers is tested here.
    evaluate = Evaluate(
        tasks="passkey", lengths=[100], per_decile=1, sparse_cache=4, cache_by="leverage", linear_length_cap=50
    )
    monkeypatch.setattr(LolcatsForCausalLM, "set_linear_length_cap", lambda self, tokens: horizons.append(tokens))
    horizons: list[int] = []
    caches, set_cache = [], LolcatsForCausalLM.set_sparse_cache

    def recorded(self, tokens: int, by: str | None = None) -> None:
        caches.append((tokens, by))
        set_cache(self, tokens, by)

    monkeypatch.setattr(LolcatsForCausalLM, "set_sparse_cache", recorded)
    sweep, runs = read_sweep(sweep_file, seeds=[0], evaluate=evaluate)
    entries = run_sweep(sweep, runs[:1], tmp_path, drop_weights=True, console=QUIET)
    (row,) = read_rows(tmp_path / RESULTS_FILE)
    ((measured),) = row["evaluation"]["passkey"]
    assert (measured["length"], len(measured["deciles"])) == (100, 10)
    assert entries[0]["metrics"]["passkey 100"]["mean"] == measured["accuracy"]
    report = json.loads((tmp_path / runs[0].name / "eval.json").read_text())
    assert report["models"][0]["passkey"] == row["evaluation"]["passkey"]
    assert not list((tmp_path / runs[0].name).glob("*.safetensors"))  # evaluated first, dropped then
    assert (caches, horizons) == ([(4, "leverage")], [50])


@pytest.mark.parametrize("length", [None, 20])
def test_length_of_held_out_sequences(length, sweep_file, tmp_path, monkeypatch):
    sections = []

    def measure(model, tokenizer, data, batch_size):
        sections.append(data)
        return {"perplexity": 5.0}

    monkeypatch.setattr("lolcats.sweep.execution.perplexity", measure)
    sweep, runs = read_sweep(sweep_file)
    sweep = sweep.model_copy(update={"held_out_length": length, "held_out_sequences": 3})
    run_sweep(sweep, runs[:1], tmp_path / "out", console=QUIET)
    assert [(data.sequence_length, data.validation_sequences) for data in sections] == [(length or 48, 3)]
    (row,) = read_rows(tmp_path / "out" / RESULTS_FILE)
    assert (row["held_out"], row["held_out_how"]) == ({"own": 5.0}, sweep.held_out_how())


def test_columns_follow_the_method(tmp_path):
    late = {"perplexity transfer": {"mean": 1.0, "std": None}}
    entries = [
        {"case": {"x": "a"}, "seeds": [0], "failed": [], "metrics": {"perplexity adjust": {"mean": 2.0, "std": 0.5}}},
        {"case": {"x": "b"}, "seeds": [0], "failed": [], "metrics": late},
    ]
    write_tables(tmp_path, entries)
    lines = (tmp_path / "table.md").read_text().replace("\u00a0", " ").splitlines()
    assert lines[0] == "| x | seeds | perplexity transfer | perplexity adjust |"
    assert lines[2:] == ["| a | 1 |  | 2.000 ± 0.500 |", "| b | 1 | 1.000 |  |"]


def test_weights_can_be_dropped(pretended, tmp_path):
    sweep, runs = pretended
    run_sweep(sweep, runs[:1], tmp_path, drop_weights=True, console=QUIET, execute=pretend([]))
    left = {path.name for path in (tmp_path / runs[0].name).iterdir()}
    assert left == {"lolcats_report.json", "run"}
    assert not (tmp_path / runs[0].name / "run" / "adjust").exists()


def test_other_settings_under_the_same_names_are_refused(pretended, sweep_file, tmp_path):
    sweep, runs = pretended
    run_sweep(sweep, runs, tmp_path, console=QUIET, execute=pretend([]))
    _, changed = read_sweep(sweep_file, overrides=["transfer.lr=0.5"])
    with pytest.raises(UserError, match=r"holds a finished run .* with other settings"):
        run_sweep(sweep, changed, tmp_path, console=QUIET, execute=pretend([]))


def test_damaged_results_are_not_overwritten(pretended, tmp_path):
    sweep, runs = pretended
    (tmp_path / "results.jsonl").write_text("{half")
    with pytest.raises(UserError, match=r"cannot read .*results\.jsonl"):
        run_sweep(sweep, runs, tmp_path, console=QUIET, execute=pretend([]))
    assert (tmp_path / "results.jsonl").read_text() == "{half"
