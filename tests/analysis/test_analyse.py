"""What analyse() finds: in tiny finished runs, and on several families against numbers computed otherwise."""

import json
import shutil

import numpy as np
import pytest
import torch
from family_models import build
from typer.testing import CliRunner

from lolcats.analysis.analyse import analyse, measure
from lolcats.cli.app import app
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.data import PackedDataset
from lolcats.errors import UserError
from lolcats.modeling.attention import AttentionCall
from lolcats.ops import Scoring

FULL = {"layer_types": ["full_attention"] * 2}
FAMILIES = {"llama3": {}, "qwen3": {}, "gemma2": FULL, "gpt-neox": {}, "gpt-oss": FULL}


@pytest.fixture(scope="module")
def analysis(finished, data_file):
    """Written by the command, whose table has each layer's error."""
    options = ["--data", str(data_file), "--sequence-length", "48", "--max-sequences", "3", "--device", "cpu"]
    result = CliRunner().invoke(app, ["analyse", str(finished[0]), *options])
    assert result.exit_code == 0, result.output
    found = json.loads((finished[0] / "analysis.json").read_text())
    assert f"{found['mse'][1]:.3g}" in result.stdout
    return found


def test_errors_agree_with_the_loss_of_stage_1(run, held_out, run_settings, tmp_path):
    """The training report's per-layer losses are 1000 * MSE on the validation split."""
    losses = run(tmp_path / "out", {"adjust": {"enabled": False}})["stages"]["transfer"]["layer_losses"]
    rows = held_out.sources[0].model_copy(update={"max_rows": run_settings["data"]["validation_rows"]})
    section = held_out.model_copy(update={"validation_sequences": None, "sources": [rows]})
    # The evaluation split also has the incomplete last sequence, so that the two agree only about.
    found = analyse(tmp_path / "out", section)["mse"]
    assert found == pytest.approx([loss / 1000 for loss in losses.values()], rel=0.2)


def test_shares_are_consistent(analysis, finished):
    assert str(finished[0].parent) not in json.dumps(analysis)
    share = analysis["linear_share"]
    for layer in range(2):
        assert np.mean(share["share_heads"][layer]) == pytest.approx(share["share"][layer])
        assert 0 < share["share"][layer] < 1


def test_a_linear_part_alone_has_all_the_weight(run, held_out, tmp_path):
    attention = {"window_size": 0, "feature_map": "t2r", "exact": [0]}
    run(tmp_path / "out", {"attention": attention, "adjust": {"enabled": False}})
    values = analyse(tmp_path / "out", held_out)
    assert values["layers"] == [1]
    assert values["linear_share"]["share"] == pytest.approx([1], abs=0.02)  # ReLU leaves single queries without any


@pytest.mark.parametrize("family", list(FAMILIES))
def test_against_plain_passes(family):
    model = convert(build(family, **FAMILIES[family]), AttentionConfig(window_size=4, exact=["1.0"]))
    tokens = np.random.default_rng(0).integers(1, 50, (2, 24)).astype(np.int32)
    found = measure(model, PackedDataset(tokens, np.ones_like(tokens, dtype=bool)))
    call = AttentionCall(mode="softmax", observe=(plain := []).append)
    with torch.no_grad():
        model(torch.from_numpy(tokens).long(), use_cache=False, attention_call=call)
        for layer, seen in enumerate(plain):
            q, k, v, target = map(seen.module.heads.take_linear, (seen.q, seen.k, seen.v, seen.y_softmax))
            sinks = [x if x is None else seen.module.heads.take_linear(x, 0) for x in seen.scoring[:1]]
            y, _ = seen.module(q, k, v, Scoring(*sinks, *seen.scoring[1:]), backend="reference")
            expected = (y - target).square().mean((0, 2, 3))
            torch.testing.assert_close(torch.tensor(found["mse_heads"][layer]), expected, rtol=1e-3, atol=1e-9)


def test_a_folder_without_a_report_is_analysed_and_others_are_refused(finished, held_out, model_dir, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(finished[0], bare, ignore=shutil.ignore_patterns("run", "lolcats_report.json"))
    assert analyse(bare, held_out)["mse"] == pytest.approx(analyse(finished[0], held_out)["mse"], rel=1e-4)
    with pytest.raises(UserError, match="not a linearized model"):
        analyse(model_dir, held_out)
    with pytest.raises(UserError, match="not a folder"):
        analyse(tmp_path / "absent", held_out)
