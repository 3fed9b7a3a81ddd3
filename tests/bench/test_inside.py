"""benchmarks/inside.py on a tiny run, against numbers computed otherwise."""

import json
import sys

import inside
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lolcats.config import DataSection
from lolcats.data import build_evaluation_dataset
from lolcats.modeling.attention import AttentionCall


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
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokens = build_evaluation_dataset(DataSection.model_validate(data), tokenizer).batch([0, 1])["input_ids"]
    errors, near = [], {"rel": 1e-3}  # four digits are written

    def observe(seen):
        errors.append(float(seen.module.output_mse(seen.q, seen.k, seen.v, seen.y_softmax, seen.scoring)))

    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "stage 1")
        model(tokens, use_cache=False, attention_call=AttentionCall(mode="softmax", observe=observe))
    assert errors == pytest.approx([sum(heads) / len(heads) for heads in own["mse"]["before LoRA"]], **near)
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
