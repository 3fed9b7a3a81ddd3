"""`lolcats sweep`: how files expand, real runs of a tiny model, and what happens to rows that fail."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from lolcats.cli import sweep
from lolcats.cli.app import app
from lolcats.cli.sweep import FOLDER, expand, numbers_of, read_sweep
from lolcats.config import LinearizeConfig, merge
from lolcats.errors import UserError

PATHS = {
    "data": {"textbooks": "textbooks.jsonl", "books": "books.jsonl"},
    "hybrid": {"encyclopedia": "encyclopedia.jsonl", "other": "other.jsonl"},
}


def config_of(words: list[str]) -> LinearizeConfig:
    """What a row's command makes of its words."""
    resolved = CliRunner().invoke(app, [*words, "--dry-run"])
    assert resolved.exit_code == 0, resolved.output
    return LinearizeConfig.from_dict(yaml.safe_load(resolved.stdout))


def write(tmp_path, **values) -> Path:
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({"recipe": "smollm2-135m-paper", **values}, sort_keys=False))
    return file


@pytest.mark.parametrize("name", [file.stem for file in FOLDER.glob("*.yaml")])
def test_shipped_sweeps_expand(name):
    spec = read_sweep(FOLDER / f"{name}.yaml", PATHS.get(name, {}))
    rows = expand(spec, {"model.path": "a/folder"})
    seed = spec["seeds"][0]
    configs = [config_of(row["words"]).to_yaml() for row in rows if row["seed"] == seed]
    assert len({*configs}) == len(configs)  # no two are the same
    assert all("path: a/folder" in text for text in configs)


def test_what_wins(tmp_path):
    file = write(
        tmp_path,
        set={"adjust.lr": 0.5, "transfer.lr": 0.5, "seed": 9, "data.sources": [{"path": "{mine}"}]},
        axes={
            "adjust.lr": [0.1, 0.2],
            "kind": {7: {"transfer.lr": 0.25}, "t2r": {"recipe": "smollm2-135m-t2r", "attention.sinks": 2}},
        },
        paths={"mine": "a.jsonl"},
        seeds=[3, 4],
    )
    rows = expand(read_sweep(file, {"mine": "x,y.jsonl"}), {"attention.sinks": 5})
    assert [row["run"] for row in rows[:4]] == [f"0.1-{kind}-seed{seed}" for kind in ("7", "t2r") for seed in (3, 4)]
    own, t2r = config_of(rows[0]["words"]), config_of(rows[2]["words"])
    assert (own.adjust.lr, own.transfer.lr, own.seed, own.recipe) == (0.1, 0.25, 3, "smollm2-135m-paper")
    assert (t2r.transfer.lr, t2r.attention.feature_map, t2r.recipe) == (0.5, "t2r", "smollm2-135m-t2r")
    assert own.attention.sinks == t2r.attention.sinks == 5
    assert own.data.sources[0].path == "x,y.jsonl"
    assert rows[-1]["case"] == {"adjust.lr": "0.2", "kind": "t2r"}


@pytest.mark.parametrize(
    ("values", "paths", "message"),
    [
        ({"axis": {}}, {}, "axis"),
        ({"axes": {"seed": 4}}, {}, "axes"),
        ({"seeds": 3}, {}, "seeds"),
        ({"held_out": {"b": "b.txt"}}, {}, "held_out"),
        ({"axes": {"adjust.lr": [1, 2]}}, {}, "differ in adjust.lr"),
        ({"paths": {"yours": None}, "set": {"x": "{yours}"}}, {}, "--path yours=FILE"),
        ({"paths": {"yours": None}}, {"theirs": "b"}, "--path theirs: the paths of .* are yours"),
        ({"axes": {"lr": {"1": {"adjust.lr": 1}}}}, {}, "differ in lr"),
        ({"axes": {"x": {"a b": {}, "a_b": {}}}}, {}, "two rows have the same name"),
    ],
)
def test_mistakes(tmp_path, values, paths, message):
    with pytest.raises(UserError, match=message):
        expand(read_sweep(write(tmp_path, **values), paths), {"adjust.lr": 1})


def test_real_rows_finish_fail_and_are_tried_again(run_settings, data_file, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    short = {stage: {"max_steps": 2, "eval_every": 2} for stage in ("transfer", "adjust")}
    recipe = merge(run_settings, short)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    own = tmp_path / "own.jsonl"
    file = write(
        tmp_path,
        recipe=str(tmp_path / "tiny.yaml"),
        axes={"rank": {"2": {"adjust.lora_rank": 2}, "none": {"model.path": str(tmp_path / "absent")}}},
        held_out={"own": {"path": str(own), "max_rows": 10}},
        perplexity={"sequence_length": 48},
    )
    own.write_text(data_file.read_text())

    def call():
        result = CliRunner().invoke(app, ["sweep", str(file), "-o", str(tmp_path / "out")])
        rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
        return result, rows

    result, (finished, failed) = call()
    assert result.exit_code == 1
    assert (finished["status"], failed["status"]) == ("finished", "failed"), result.output
    assert f"none-seed0, see {tmp_path}/out/none-seed0.log" in result.stderr.replace("\n", "")
    assert "absent" in Path(failed["log"]).read_text()
    assert {"perplexity teacher", "perplexity adjust", "perplexity on own"} <= numbers_of(finished).keys()
    assert f"{finished['held_out']['own']:.3f}" in result.stdout
    monkeypatch.setattr(sweep, "_call", lambda line, *_, **__: line[-2] != str(tmp_path / "out" / "none-seed0"))
    _, again = call()
    assert again[0] == finished  # not run again, or its command would have failed
    assert again[1]["status"] == "failed"


def test_rows_share_the_gpus(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(sweep, "_call", lambda line, _, env, **__: seen.append((line[:3], env["CUDA_VISIBLE_DEVICES"])))
    spec = read_sweep(write(tmp_path, seeds=[0, 1, 2, 3]), {})
    rows = sweep.run_rows(spec, expand(spec, {}), tmp_path / "out")
    assert [row["seed"] for row in rows] == [0, 1, 2, 3]
    assert {gpu for _, gpu in seen} <= {"3", "5"}
    assert all(command == [sys.executable, "-m", "lolcats"] for command, _ in seen)


def test_a_sweep_that_is_ended_ends_its_runs(tmp_path, monkeypatch):
    python = tmp_path / "python"
    ends = f"trap 'touch {tmp_path}/ended; exit 1' TERM"
    python.write_text(f"#!/bin/sh\n{ends}\nsleep 0.2; kill -TERM {os.getpid()}\nsleep 60 & wait\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    spec = read_sweep(write(tmp_path), {})
    with pytest.raises(KeyboardInterrupt, match="the same command continues"):
        sweep.run_rows(spec, expand(spec, {}), tmp_path / "out")
    assert (tmp_path / "ended").exists()
