"""Effective sequence length against the paper's formula written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lolcats.config import DataSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.data import build_datasets, effective_length
from lolcats.data.effective_length import (
    cached_lengths,
    dataset_lengths,
    keep_longest,
    query_lengths,
    sequence_lengths,
)
from lolcats.errors import UserError


def tiny(model_type: str = "llama", **changes):
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        head_dim=8,
        **changes,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def by_definition(weights_BHTT):
    """Sum over queries of the expected distance, mean over heads."""
    position = torch.arange(weights_BHTT.shape[-1])
    distance = (position[:, None] - position).clamp_min(0)
    return (weights_BHTT * distance).sum((-1, -2)).mean(1)


def test_uniform_attention_looks_half_way_back():
    lengths = query_lengths(torch.zeros(1, 2, 9, 4), torch.zeros(1, 2, 9, 4))
    torch.testing.assert_close(lengths[0, 1], torch.arange(9) / 2)


@pytest.mark.parametrize(("model_type", "changes"), [("llama", {}), ("gemma2", {"sliding_window": 4})])
def test_against_attention_weights(model_type, changes):
    model = tiny(model_type, **changes)
    ids = torch.randint(0, 300, (3, 21))
    found = sequence_lengths(model, ids)
    assert model.config._attn_implementation == "sdpa"  # as before
    model.set_attn_implementation("eager")
    weights = model(ids, output_attentions=True).attentions
    expected = torch.stack([by_definition(layer) for layer in weights]).mean(0)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-2)


def test_a_linearized_model_reports_its_softmax_attention():
    ids = torch.randint(0, 300, (2, 30))
    expected = sequence_lengths(tiny(), ids)
    model = convert(tiny(), AttentionConfig(window_size=4))
    torch.testing.assert_close(sequence_lengths(model, ids), expected, rtol=1e-4, atol=1e-3)


@pytest.fixture
def section(write_rows):
    words = np.random.default_rng(0)
    texts = [{"text": " ".join(map(str, words.integers(0, 10 ** (1 + n % 4), 30)))} for n in range(40)]
    return DataSection.model_validate(
        {"sources": [{"path": write_rows("t.jsonl", texts)}], "sequence_length": 32, "validation_rows": 2}
    )


def test_top_esl_keeps_the_longest(section, tokenizer):
    model = tiny()
    whole, validation = build_datasets(section, tokenizer, seed=0, progress=False)
    lengths = dataset_lengths(whole, model, batch_size=5)
    chosen = section.model_copy(update={"top_esl": 7})
    kept, same = build_datasets(chosen, tokenizer, seed=0, progress=False, model=model)
    assert same.info == validation.info
    best = sorted(np.argsort(-lengths)[:7])
    np.testing.assert_array_equal(kept.input_ids, whole.input_ids[best])
    assert kept.info["sequences"] == 7
    assert kept.info["fingerprint"] != whole.info["fingerprint"]
    spread = kept.info["effective_length"]
    assert spread["kept"]["deciles"][0] >= spread["all"]["deciles"][5]


def test_lengths_are_measured_once_for_each_model(section, tokenizer, tmp_path, monkeypatch):
    data, _ = build_datasets(section, tokenizer, seed=0, progress=False)
    first = cached_lengths(data, tiny(), tmp_path / "esl")
    calls = []
    monkeypatch.setattr(effective_length, "dataset_lengths", lambda *_, **__: calls.append(1) or first * 2)
    np.testing.assert_array_equal(cached_lengths(data, tiny(), tmp_path / "esl"), first)
    other = tiny()
    other.lm_head.weight.data[0, 0] += 1
    np.testing.assert_array_equal(cached_lengths(data, other, tmp_path / "esl"), first * 2)
    assert calls == [1]


def test_mistakes(section, tokenizer):
    data, _ = build_datasets(section, tokenizer, seed=0, progress=False)
    with pytest.raises(UserError, match="there are only"):
        keep_longest(data, np.ones(len(data)), len(data) + 1)
    with pytest.raises(UserError, match="needs the model"):
        build_datasets(section.model_copy(update={"top_esl": 2}), tokenizer, seed=0, progress=False)
