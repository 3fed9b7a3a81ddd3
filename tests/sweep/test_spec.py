"""Sweep files: how they expand, the shipped ones, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from lolcats.cli.app import app
from lolcats.config import LinearizeConfig
from lolcats.errors import UserError
from lolcats.sweep.spec import commands, read_sweep
from lolcats.sweeps import list_sweeps, sweep_path

# name -> (runs, stage 1 trainings)
SHIPPED = {
    **{"main": (18, 9), "components": (8, 4), "windows": (5, 5), "lora-rank": (8, 1), "lora-projections": (14, 1)},
    **{"data": (4, 4), "transfer-steps": (10, 9), "blocks": (6, 6), "softmax-layers": (8, 4), "passkey": (4, 4)},
    **{"seeds": (6, 6), "plus": (18, 9), "plus-transfer": (10, 10), "plus-adjust": (9, 3), "plus-long": (9, 9)},
    **{"plus-default": (9, 6), "plus-positions": (27, 21), "plus-gemma": (21, 15), "hybrid": (75, 12)},
}
PATHS = {
    "data": {"textbooks": "textbooks.jsonl", "books": "books.jsonl"},
    "hybrid": {"encyclopedia": "encyclopedia.jsonl", "other": "other.jsonl"},
}


def write(tmp_path, **values):
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({"recipe": "smollm2-135m-paper", **values}, sort_keys=False))
    return file


def test_every_shipped_sweep_is_tested():
    assert set(SHIPPED) == set(list_sweeps())


@pytest.mark.parametrize("name", list(SHIPPED))
def test_shipped_sweeps_expand(name):
    _, runs = read_sweep(sweep_path(name), model="a/folder", paths=PATHS.get(name))
    assert (len(runs), len({run.stage_1 for run in runs} - {None})) == SHIPPED[name]
    assert len({run.config.to_yaml() for run in runs}) == len(runs)  # no two runs are the same
    assert all(run.config.model.path == "a/folder" for run in runs)


def test_the_papers_values():
    ranks = [run.config.adjust for run in read_sweep(sweep_path("lora-rank"))[1]]
    assert [(item.lora_rank, item.lora_alpha / item.lora_rank) for item in ranks[:3]] == [(4, 2), (8, 2), (16, 2)]
    assert ranks[-1].method == "full"
    steps = read_sweep(sweep_path("transfer-steps"))[1]
    assert [run.config.transfer.max_steps for run in steps[1:]] == list(range(200, 2000, 200))
    assert not steps[0].config.transfer.enabled
    assert {run.config.adjust.max_steps for run in steps} == {1000}
    assert [run.seed for run in read_sweep(sweep_path("seeds"))[1]] == [0, 1, 2, 0, 1, 2]
    names = [run.name for run in read_sweep(sweep_path("components"))[1]]
    assert names[0] == "hedgehog-no-none-seed0"
    kept = {
        run.case["softmax layers"]: run.config.attention.exact for run in read_sweep(sweep_path("softmax-layers"))[1]
    }
    assert kept["first half"] == ("0-14",)
    assert kept["last half"] == ("15-29",)
    assert kept["every second"] == tuple(str(layer) for layer in range(0, 30, 2))


def test_what_wins(tmp_path):
    file = write(
        tmp_path,
        set={"adjust.lr": 0.5, "transfer.lr": 0.5, "seed": 9},
        axes={
            "adjust.lr": [0.1, 0.2],
            "kind": {"own": {"transfer.lr": 0.25}, "t2r": {"recipe": "smollm2-135m-t2r", "attention.sinks": 2}},
        },
        seeds=[3, 4],
    )
    _, runs = read_sweep(file, overrides=["attention.sinks=5"], data=[{"path": "x.jsonl"}])
    assert [run.name for run in runs[:4]] == [f"lr_0.1-{kind}-seed{seed}" for kind in ("own", "t2r") for seed in (3, 4)]
    own, t2r = runs[0].config, runs[2].config
    assert (own.adjust.lr, own.transfer.lr, own.seed, own.recipe) == (0.1, 0.25, 3, "smollm2-135m-paper")
    assert (t2r.transfer.lr, t2r.attention.feature_map, t2r.recipe) == (0.5, "t2r", "smollm2-135m-t2r")
    assert own.attention.sinks == t2r.attention.sinks == 5
    assert own.data.sources[0].path == "x.jsonl"
    assert runs[-1].case == {"adjust.lr": "0.2", "kind": "t2r"}


def test_paths_skip_and_seeds(tmp_path):
    file = write(
        tmp_path,
        paths={"mine": "a.jsonl", "yours": None},
        axes={
            "source": {x: {"data.sources": [{"path": f"{{{x}}}"}]} for x in ("mine", "yours")},
            "seed_of": {"x": {}, "y": {}},
        },
        skip=[{"source": "mine", "seed_of": "y"}],
        held_out={"yours": {"path": "{yours}", "max_rows": 5}},
    )
    with pytest.raises(UserError, match="--path yours=FILE"):
        read_sweep(file)
    sweep, runs = read_sweep(file, paths={"yours": "b.jsonl"}, seeds=[7])
    assert [run.name for run in runs] == ["mine-x-seed7", "yours-x-seed7", "yours-y-seed7"]
    assert [run.config.data.sources[0].path for run in runs] == ["a.jsonl", "b.jsonl", "b.jsonl"]
    assert (sweep.held_out["yours"].path, sweep.held_out["yours"].max_rows) == ("b.jsonl", 5)
    with pytest.raises(UserError, match="--data would replace"):
        read_sweep(file, paths={"yours": "b.jsonl"}, data=[{"path": "c"}])
    with pytest.raises(UserError, match=r"--path theirs: .* mine, yours"):
        read_sweep(file, paths={"theirs": "b.jsonl"})


def test_stage_1_is_shared_by_runs_that_agree_up_to_it(tmp_path):
    file = write(tmp_path)
    plain, small, other, first = (
        read_sweep(file, overrides=[text])[1][0].stage_1
        for text in ("adjust.lr=2", "transfer.micro_batch_size=1", "adjust.lr=1", "transfer.lr=1")
    )
    assert plain == small == other != first
    assert read_sweep(file, overrides=["transfer.enabled=false"])[1][0].stage_1 is None


@pytest.mark.parametrize(("exact", "is_shared"), [("[12%]", True), ("['7.2']", False)])
def test_how_exact_heads_keep_their_keys_matters_once_they_are_known(tmp_path, exact, is_shared):
    file = write(tmp_path)
    overrides = [f"attention.exact={exact}"], [f"attention.exact={exact}", "attention.exact_bits=8"]
    all_bits, eight = (read_sweep(file, overrides=[*given])[1][0].stage_1 for given in overrides)
    assert (all_bits == eight) is is_shared


def test_linearize_makes_the_same_configuration_of_the_command(tmp_path):
    file = write(
        tmp_path,
        axes={
            "adjust.lora_targets": [["q", "k"]],
            "kind": {"a": {"data.sources": [{"path": "x,y.jsonl", "weight": 0.5}], "attention.feature_map": None}},
        },
        held_out={"own text": {"path": "b.jsonl", "max_rows": 5}},
        held_out_sequences=3,
        evaluate={"tasks": "passkey,recall", "lengths": [64, 128], "linear_length_cap": 16, "haystack": "b.jsonl"},
    )
    sweep, (run,) = read_sweep(file, model="a/b")
    linearize, perplexity, evaluate = commands(sweep, run, tmp_path / "out", transfer_from="other")
    assert linearize[-2:] == ["--transfer-from", str(tmp_path / "out" / "other")]
    resolved = CliRunner().invoke(app, [*linearize[1:], "--dry-run"])
    assert LinearizeConfig.from_dict(yaml.safe_load(resolved.stdout)) == run.config
    assert perplexity[1:5] == ["perplexity", str(tmp_path / "out" / run.name), "--data", "b.jsonl,max_rows=5"]
    assert perplexity[perplexity.index("--max-sequences") + 1] == "3"
    assert evaluate[evaluate.index("--lengths") + 1] == "64,128"
    assert evaluate[evaluate.index("--linear-length-cap") + 1] == "16"
    assert evaluate[evaluate.index("--haystack") + 1] == "b.jsonl"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"axis": {}}, "axis: there is no such field; did you mean axes"),
        ({"axes": {"attention.window_sizes": [1]}}, "(?s)run window_sizes_1-seed0: .*window_sizes"),
        ({"axes": {"attention.window_size": [-1]}}, "attention.window_size"),
        ({"axes": {"recipe_": {"a": {"recipe": "nothing"}}}}, "no recipe named 'nothing'"),
        ({"axes": {"x": {"a b": {}, "a_b": {}}}}, "two runs would be called a_b-seed0"),
        ({"evaluate": {"tasks": "passkey", "sinks": 1}}, "evaluate.sinks: there is no such field"),
        ({"seeds": [1, 1]}, "two runs would be called seed1"),
        ({"axes": {"x": {"a": {}}}, "skip": [{"x": "a"}]}, "no run is left"),
    ],
)
def test_mistakes_are_named(tmp_path, values, message):
    with pytest.raises(UserError, match=message):
        read_sweep(write(tmp_path, **values))


def test_unknown_sweeps_list_the_known_ones():
    with pytest.raises(UserError, match="there are blocks, components, data"):
        sweep_path("nothing")


def test_the_documentations_example_is_a_sweep(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "analysis.md").read_text()
    file = tmp_path / "example.yaml"
    file.write_text(text.split("```yaml\n")[1].split("```")[0])
    sweep, runs = read_sweep(file, paths={"books": "b.jsonl"})
    assert len(runs) == (2 * 3 - 1) * 3
    assert sweep.held_out["books"].path == "b.jsonl"
