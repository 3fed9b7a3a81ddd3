"""What analyse() finds in tiny finished runs, against numbers computed otherwise."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lolcats.analysis.analyse import ablated_attention, analyse, part_ablations
from lolcats.analysis.stages import load_stages
from lolcats.config.attention import AttentionConfig
from lolcats.data import build_evaluation_dataset
from lolcats.errors import UserError
from lolcats.evaluation.perplexity import dataset_perplexity


@pytest.fixture(scope="module")
def analysis(finished, held_out):
    return analyse(finished, held_out)


@pytest.fixture(scope="module")
def original(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir)


@pytest.fixture
def dataset(finished, held_out):
    return build_evaluation_dataset(held_out, AutoTokenizer.from_pretrained(finished), progress=False)


def test_the_file_is_what_was_returned(analysis, finished):
    assert json.loads((finished / "analysis.json").read_text()) == json.loads(json.dumps(analysis))
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


def test_perplexities_agree_with_other_ways_to_them(analysis, finished, original, dataset):
    expected = {
        "teacher": dataset_perplexity(original, dataset)["perplexity"],
        "adjust": dataset_perplexity(AutoModelForCausalLM.from_pretrained(finished), dataset)["perplexity"],
    }
    for name, value in expected.items():
        assert analysis["perplexity"][name] == pytest.approx(value, rel=1e-4)
    assert analysis["ablations"]["full"] == pytest.approx(expected["adjust"], rel=1e-6)
    assert len(set(analysis["perplexity"].values())) == 4


def test_errors_agree_with_the_loss_of_stage_1(analysis, finished, held_out, run_settings):
    """The training report's per-layer losses are 1000 * MSE on the validation split."""
    losses = json.loads((finished / "lolcats_report.json").read_text())["stages"]["transfer"]
    rows = held_out.sources[0].model_copy(update={"max_rows": run_settings["data"]["validation_rows"]})
    section = held_out.model_copy(update={"validation_sequences": None, "sources": [rows]})
    values = analyse(finished, section, output=finished / "other.json")
    for stage, key in (("swapped", "layer_losses_before"), ("transfer", "layer_losses")):
        # The evaluation split also has the incomplete last sequence, so that the two agree only about.
        expected = [losses[key][str(layer)] / 1000 for layer in (0, 1)]
        assert values["mse"][stage] == pytest.approx(expected, rel=0.2)
    assert sum(analysis["mse"]["transfer"]) < sum(analysis["mse"]["swapped"])
    assert analysis["mse"]["transfer"] == analysis["mse_original"]["transfer"]
    assert analysis["mse"]["adjust"] != analysis["mse_original"]["adjust"]


def test_errors_by_position_and_by_head_add_up_to_those_by_layer(analysis):
    found = analysis["error_by_position"]
    assert found["positions"] == analysis["linear_share"]["distances"]
    assert found["tokens"] == [3 * (last - first + 1) for first, last in found["positions"]]  # of three sequences
    for stage in analysis["stages"]:
        for layer in (0, 1):
            for kind, expected in (
                ("mse", analysis["mse"][stage][layer]),
                ("signal", sum(analysis["signal_heads"][stage][layer]) / 4),
            ):
                row = found[kind][stage][layer]
                total = sum(value * tokens for value, tokens in zip(row, found["tokens"], strict=True))
                assert total / sum(found["tokens"]) == pytest.approx(expected, rel=1e-4)
            # A terraced window of 4 tokens is softmax attention up to position 7.
            assert max(found["relative"][stage][layer][:4]) < 1e-6 < min(found["relative"][stage][layer][4:])
    assert analysis["signal_heads"]["swapped"] != analysis["signal_heads"]["adjust"]


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


def test_ablations_take_parts_away(analysis, finished, dataset):
    ablations = analysis["ablations"]
    assert len({f"{value:.6f}" for value in ablations.values()}) == 4
    weights, _ = load_stages(finished)
    for _, module in weights.model.linear_layers():
        module.q_weight.data = torch.full_like(module.q_weight, torch.nan)
    without = part_ablations(weights.model, dataset)
    assert without["window_only"] == pytest.approx(ablations["window_only"], rel=1e-6)
    assert without["full"] == without["linear_only"] == torch.inf  # these need the feature maps
    spec = weights.model.config.attention
    assert ablated_attention(spec, "window_only") == replace(spec, feature_map=None)
    assert ablated_attention(spec, "linear_only") == replace(spec, window="sliding", window_size=1, window_blocks=1)
    assert ablated_attention(AttentionConfig(window_size=0), "window_only") is None
    assert ablated_attention(AttentionConfig(feature_map=None), "linear_only") is None
    capped = AttentionConfig(linear_length_cap=9)
    assert ablated_attention(capped, "window_only") == AttentionConfig(feature_map=None)
    assert ablated_attention(capped, "linear_only") == AttentionConfig("sliding", 1, 1, linear_length_cap=9)


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
        assert values["ablations"]["window_only"] is None


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
