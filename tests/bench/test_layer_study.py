"""benchmarks/layer_study.py on the tiny model."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from lolcats.evaluation.load import load_model


@pytest.fixture
def execute(model_dir, data_file, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("layer_study")

    def run(*options):
        file = tmp_path / "study.json"
        small = ["--sequences", 6, "--validation", 2, "--steps", 30]
        settings = (
            "data.sequence_length=48",
            "data.validation_rows=10",
            "attention.window_size=4",
            "attention.feature_dim=4",
        )
        for override in settings:
            small += ["--set", override]
        given = ["--model", model_dir, "--data", data_file, "--work", tmp_path / "work", "--json", file]
        monkeypatch.setattr(sys, "argv", ["layer_study.py", *map(str, [*given, *small, *options])])
        script.main()
        return json.loads(file.read_text())["rows"]

    yield run
    del sys.modules["layer_study"]


def test_arms_train_on_the_same_activations(execute, capsys):
    arms = ["--arm", "plain:", "--arm", "again:", "--arm", "sinks: attention.sinks=2 attention.window_gamma=0.5"]
    plain, again, sinks = (row["layers"]["1"] for row in execute("--layers", 1, *arms))
    assert plain == again
    assert len(plain["errors"]) == 2
    assert plain["errors"][-1] < plain["errors"][0]
    assert sinks["errors"][0] != plain["errors"][0]
    assert "sinks" in capsys.readouterr().out


def test_all_layers_are_a_model(execute, tmp_path):
    (row,) = execute("--all-layers", "--output", tmp_path / "models", "--arm", "two sinks: attention.sinks=2")
    assert len(row["layers"]) > 1
    model, _ = load_model(tmp_path / "models" / "two_sinks")
    assert model.config.sinks == 2
    assert row["perplexity"] > 1
