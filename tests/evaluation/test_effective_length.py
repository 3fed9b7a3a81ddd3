"""Effective sequence length against the paper's formula written out."""

import numpy as np
import pytest
import torch
from family_models import COMMON
from transformers import AutoConfig, AutoModelForCausalLM

from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert, keep_softmax
from lolcats.data import PackedDataset
from lolcats.evaluation.effective_length import effective_lengths, sequence_lengths


def tiny(model_type: str = "llama", **changes):
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **COMMON, head_dim=8, **changes)
    return AutoModelForCausalLM.from_config(config).eval()


def by_definition(weights_BHTT):
    """Sum over queries of the expected distance, mean over heads."""
    position = torch.arange(weights_BHTT.shape[-1])
    distance = (position[:, None] - position).clamp_min(0)
    return (weights_BHTT * distance).sum((-1, -2)).mean(1)


@pytest.mark.parametrize(("model_type", "changes"), [("llama", {}), ("gemma2", {"sliding_window": 4})])
def test_against_attention_weights(model_type, changes):
    model = tiny(model_type, **changes)
    ids = torch.randint(0, 96, (3, 21))
    found = sequence_lengths(keep_softmax(tiny(model_type, **changes)), ids)
    model.set_attn_implementation("eager")
    weights = model(ids, output_attentions=True).attentions
    expected = torch.stack([by_definition(layer) for layer in weights]).mean(0)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-2)


def test_a_linearized_model_reports_its_softmax_attention():
    ids = torch.randint(0, 96, (2, 30))
    expected = sequence_lengths(keep_softmax(tiny()), ids)
    model = convert(tiny(), AttentionConfig(window_size=4))
    torch.testing.assert_close(sequence_lengths(model, ids), expected, rtol=1e-4, atol=1e-3)


def test_a_data_set_is_measured_in_batches():
    ids = torch.randint(0, 96, (7, 12))
    data = PackedDataset(ids.int().numpy(), np.ones((7, 12), bool))
    model = keep_softmax(tiny())
    found = effective_lengths(model, data, batch_size=3)
    lengths = sequence_lengths(model, ids)
    assert (found["sequences"], sum(found["histogram"]["counts"])) == (7, 7)
    assert found["mean"] == pytest.approx(lengths.mean().item(), rel=1e-4)
