"""benchmarks/inside.py on a tiny run, against numbers computed otherwise."""

import json
import sys

import inside
import pytest
import torch
from safetensors.torch import load_file

from lolcats.analysis.analyse import analyse
from lolcats.config import DataSection


def test_errors_maps_and_changes_are_those_of_the_run(run, finished, model_dir, data_file, tmp_path, monkeypatch):
    monkeypatch.setattr(inside, "HELD_OUT", 20)
    monkeypatch.setattr(inside, "BINS", 16)
    file = tmp_path / "out.json"
    options = ["--original", model_dir, "--data", data_file, "--json", file, "--sequences", "2", "--length", "48"]
    monkeypatch.setattr(sys, "argv", ["", f"run={finished[0]}", *map(str, options), "--updates", "20", "--tokens", "3"])
    inside.main()
    found = json.loads(file.read_text())
    own = found["runs"]["run"]

    run(tmp_path / "stage 1", {"adjust": {"enabled": False}})
    data = {"sources": [{"path": str(data_file)}], "sequence_length": 48, "validation_sequences": 2}
    errors = analyse(tmp_path / "stage 1", DataSection.model_validate(data))["mse_heads"]
    near = {"rel": 1e-3}  # four digits are written
    assert [pytest.approx(layer, **near) for layer in errors] == own["mse"]["before LoRA"]
    means = {state: torch.tensor(error).mean() for state, error in own["mse"].items()}
    assert means["LoRA on errors"] < 0.9 * means["before LoRA"] < means["LoRA"]  # which learns other things
    for rows in (*own["map"].values(), *found["original"]["map"].values()):
        assert [sum(row) for row in rows] == pytest.approx([10_000] * 16, abs=16)  # sixteen rounded numbers
    before, after = (load_file(path / "model.safetensors") for path in (model_dir, finished[0]))
    for projection, norms in own["travel"].items():
        for layer, change in enumerate(norms["change"]):
            name = f"model.layers.{layer}.self_attn.{projection}_proj.weight"
            expected = (after[f"model.{name}"] - before[name]).norm() / before[name].norm()
            assert change == pytest.approx(float(expected), **near)
            assert norms["a"][layer] < 0.2 * norms["a0"][layer]  # six updates; another A0 is 1.4 of it away
    assert len(own["written"]) == len(found["original"]["written"]) == 4
