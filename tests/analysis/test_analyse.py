"""What analyse() finds in tiny finished runs, against numbers computed otherwise."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lolcats.analysis.analyse import analyse
from lolcats.analysis.stages import load_stages
from lolcats.cli.app import app
from lolcats.errors import UserError


@pytest.fixture(scope="module")
def analysis(finished, data_file):
    """Written by the command, whose table has each layer's error."""
    options = ["--data", str(data_file), "--sequence-length", "48", "--max-sequences", "3", "--device", "cpu"]
    result = CliRunner().invoke(app, ["analyse", str(finished), *options])
    assert result.exit_code == 0, result.output
    found = json.loads((finished / "analysis.json").read_text())
    assert f"{found['mse']['adjust'][1]:.3g}" in result.stdout
    return found


@pytest.fixture(scope="module")
def original(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir)


def test_what_the_file_says(analysis, finished):
    assert str(finished.parent) not in json.dumps(analysis)
    assert analysis["stages"] == ["swapped", "transfer", "adjust"]
    assert analysis["layers"] == [0, 1]
    assert analysis["notes"] == []


def test_the_weights_before_stage_2_are_the_original_models(finished, original):
    weights, _ = load_stages(finished)
    names = dict(original.named_parameters())
    for stage in ("swapped", "transfer"):
        weights.use(stage)
        for name, parameter in names.items():
            torch.testing.assert_close(weights.model.get_parameter(f"model.{name}"), parameter, rtol=0, atol=1e-5)
    weights.use("adjust")
    moved = weights.model.get_parameter("model.model.layers.0.self_attn.q_proj.weight")
    assert not torch.allclose(moved, names["model.layers.0.self_attn.q_proj.weight"], atol=1e-3)


def test_errors_agree_with_the_loss_of_stage_1(analysis, finished, held_out, run_settings, tmp_path):
    """The training report's per-layer losses are 1000 * MSE on the validation split."""
    losses = json.loads((finished / "lolcats_report.json").read_text())["stages"]["transfer"]
    rows = held_out.sources[0].model_copy(update={"max_rows": run_settings["data"]["validation_rows"]})
    section = held_out.model_copy(update={"validation_sequences": None, "sources": [rows]})
    values = analyse(shutil.copytree(finished, tmp_path / "out"), section)
    for stage, key in (("swapped", "layer_losses_before"), ("transfer", "layer_losses")):
        # The evaluation split also has the incomplete last sequence, so that the two agree only about.
        expected = [losses[key][str(layer)] / 1000 for layer in (0, 1)]
        assert values["mse"][stage] == pytest.approx(expected, rel=0.2)
    assert sum(analysis["mse"]["transfer"]) < sum(analysis["mse"]["swapped"])
    assert analysis["mse"]["transfer"] == analysis["mse_original"]["transfer"]
    assert analysis["mse"]["adjust"] != analysis["mse_original"]["adjust"]


def test_shares_and_maps_are_consistent(analysis):
    share, maps = analysis["linear_share"], analysis["maps"]
    for stage in analysis["stages"]:
        for layer in range(2):
            assert sum(share["by_distance"][stage][layer]) == pytest.approx(1, abs=1e-5)
            parts = share["linear_by_distance"][stage][layer]
            assert sum(parts) == pytest.approx(share["share"][stage][layer], abs=1e-5)
            assert parts[:3] == [0, 0, 0]  # distances 0 to 3 are within a terraced window of 4 + 4
            assert 0 < share["share"][stage][layer] < 1
    for layer in range(2):
        assert sum(share["softmax_by_distance"][layer]) == pytest.approx(1, abs=1e-5)
    assert share["distances"][-1] == [32, 47]
    assert {(entry["layer"], entry["head"]) for entry in maps["maps"]} == {(x, y) for x in range(2) for y in range(4)}
    first = maps["maps"][0]
    assert set(first) == {"layer", "head", "softmax", "swapped", "transfer", "adjust"}
    assert len(first["softmax"]) == 32
    assert len(maps["keys"]) == len(first["softmax"][0]) == 48  # the two ends overlap in 48 tokens
    assert sum(first["softmax"][-1]) == pytest.approx(1, abs=1e-3)  # all keys shown; rounded
    assert first["swapped"] != first["transfer"]


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({"adjust": {"enabled": False}}, ["swapped", "transfer"]),
        ({"transfer": {"enabled": False}, "adjust": {"train_feature_maps": True}}, ["swapped", "adjust"]),
        ({"adjust": {"train_feature_maps": True}}, ["swapped", "transfer", "adjust"]),
        ({"adjust": {"method": "full"}}, ["adjust"]),
        (
            {"attention": {"window_size": 0, "feature_map": "t2r", "exact": [0]}},
            ["swapped", "transfer", "adjust"],
        ),
    ],
    ids=["transfer-only", "no-transfer", "maps-too", "full", "t2r-half"],
)
def test_other_runs(make_run, held_out, changes, stages):
    short = {"transfer": {"max_steps": 2}, "adjust": {"max_steps": 2}}
    output = make_run({key: short.get(key, {}) | changes.get(key, {}) for key in {*short, *changes}})
    values = analyse(output, held_out)
    assert values["stages"] == stages
    assert bool(values["notes"]) == (stages == ["adjust"])
    assert all(value > 0 for row in values["mse"].values() for value in row)
    if changes.get("attention"):
        assert values["layers"] == [1]
        # All weight is linear; ReLU features can leave single queries without any.
        assert values["linear_share"]["share"]["adjust"] == pytest.approx([1], abs=0.02)


def test_without_a_run_folder_or_report(finished, held_out, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(finished, bare, ignore=shutil.ignore_patterns("run", "lolcats_report.json"))
    values = analyse(bare, held_out)  # config.json still says how it was made
    assert values["stages"] == ["adjust"]
    assert "run/adjust" in values["notes"][0]
    config = json.loads((bare / "config.json").read_text())
    config["provenance"] = {}
    (bare / "config.json").write_text(json.dumps(config))
    values = analyse(bare, held_out)
    assert values["stages"] == ["trained"]
    # Layer 0 reads the embeddings; later layers read hidden states of other weights than with all stages known.
    assert values["mse"]["trained"][0] == pytest.approx(analyse(finished, held_out)["mse"]["adjust"][0], rel=1e-4)


def test_what_cannot_be_analysed(finished, held_out, model_dir, tmp_path):
    with pytest.raises(UserError, match="not a linearized model"):
        analyse(model_dir, held_out)
    with pytest.raises(UserError, match="not a folder"):
        analyse(tmp_path / "absent", held_out)
