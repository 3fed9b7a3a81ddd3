"""Choosing softmax layers: the ranking finds the bad layer, memory is what a cache holds, restored models work."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from lolcats.analysis.selection import Losses, curve, rank_layers, sequence_bytes, softmax_in
from lolcats.cli.app import app
from lolcats.config import AttentionSection
from lolcats.conversion import convert
from lolcats.data import PackedDataset

LAYERS, LENGTH = 4, 24


@pytest.fixture
def model():
    """Attention over a window that holds all tokens is softmax attention; layer 2 sees its own token only."""
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    linearized = convert(LlamaForCausalLM(config), AttentionSection(window="sliding", window_size=64)).eval()
    bad = dict(linearized.linear_layers())[2]
    bad.spec = replace(bad.spec, window_size=1)
    return linearized


@pytest.fixture
def dataset(model):
    """Text that the softmax model itself would write, so that leaving it costs something."""
    with model.attention_mode("softmax"):
        start = torch.arange(4)[:, None]
        tokens = model.generate(start, max_new_tokens=LENGTH - 1, do_sample=True, use_cache=False, eos_token_id=None)
    return PackedDataset(tokens.numpy(), tokens.numpy(), info={})


@pytest.mark.parametrize("way", ["restored", "linearized"])
def test_the_bad_layer_ranks_first(model, dataset, way):
    ranking = rank_layers(Losses(model, dataset), way)
    assert ranking[0]["layer"] == 2
    assert ranking[0]["worth"] > 0.05
    assert all(abs(row["worth"]) < 1e-4 for row in ranking[1:])


def test_the_curve_ends_at_softmax(model, dataset):
    losses = Losses(model, dataset)
    order = [row["layer"] for row in rank_layers(losses, "restored")]
    points = curve(losses, order, [0, 1, LAYERS], context=500)
    with model.attention_mode("softmax"):
        softmax = Losses(model, dataset)(range(LAYERS))
    assert points[0]["loss"] > points[1]["loss"] + 0.05
    assert points[1]["softmax"] == [2]
    assert points[2]["loss"] == pytest.approx(softmax, abs=1e-6)
    assert points[0]["bytes"] < points[1]["bytes"] < points[2]["bytes"]


def test_nothing_is_measured_twice(model, dataset):
    calls = []
    losses = Losses(model, dataset, on_measure=lambda: calls.append(1))
    first = rank_layers(losses, "restored")
    assert len(calls) == LAYERS + 1
    assert rank_layers(losses, "restored") == first
    again = Losses(model, None, known=dict(losses.known))  # would fail if it measured
    assert rank_layers(again, "restored") == first


def test_modes_come_back(model):
    with softmax_in(model, [1]):
        assert [module.mode for _, module in model.linear_layers()] == ["linear", "softmax", "linear", "linear"]
    assert {module.mode for _, module in model.linear_layers()} == {"linear"}


@torch.no_grad()
def test_memory_is_what_a_cache_holds(model):
    model.restore_softmax([1])
    context = 90
    cache = DynamicCache(config=model.config.get_text_config())
    model(torch.ones(1, context).long(), past_key_values=cache)
    held = 0
    for layer in cache.layers:
        state = getattr(layer, "state", None)
        held += state.nbytes if state is not None else layer.keys.nbytes + layer.values.nbytes
    assert sequence_bytes(model, [], context) == held


@torch.no_grad()
def test_restored_layers_are_softmax_for_good(model, tmp_path):
    tokens = torch.randint(2, 40, (2, 30))
    with softmax_in(model, [1, 3]):
        expected = model(tokens).logits
    model.restore_softmax([3, 1])
    assert model.softmax_layers() == [1, 3]
    assert [index for index, _ in model.linear_layers()] == [0, 2]
    torch.testing.assert_close(model(tokens).logits, expected)
    dict(model.linear_layers())[2].spec = model.config.spec()
    expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(tokens).logits, expected)
    answers = [loaded.generate(tokens, max_new_tokens=9, do_sample=False, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("layers", [[9], [0, 1, 2, 3]])
def test_impossible_layers_are_refused(model, layers):
    with pytest.raises(ValueError, match="expected some, and not all"):
        model.restore_softmax(layers)


def test_the_command(finished, data_file, tmp_path):
    output, picture = tmp_path / "hybrid", tmp_path / "curve.png"
    arguments = ["select-layers", str(finished), "--data", str(data_file), "--sequence-length", "48"]
    arguments += ["--max-sequences", "2", "--budget", "1", "-o", str(output)]
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(app, [*arguments, "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert "--keep-softmax" in result.stdout
    chosen = json.loads((finished / "selection.json").read_text())["ranking"][0]["layer"]
    assert AutoModelForCausalLM.from_pretrained(output).softmax_layers() == [chosen]
    assert picture.stat().st_size > 1000
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 1
    assert "not an empty folder" in again.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "2"], "choose 1 to 1"),
        (["-o", "x"], "give --budget too"),
        (["--way", "best"], "expected one of restored, linearized"),
    ],
)
def test_wrong_options_say_why(finished, data_file, options, message):
    result = CliRunner().invoke(app, ["select-layers", str(finished), "--data", str(data_file), *options])
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
