"""Feature maps: definitions, shapes, names."""

from __future__ import annotations

import math
from typing import get_args, get_type_hints

import pytest
import torch

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.feature_maps import FEATURE_MAPS, FeatureMap, get_feature_map

E = math.e
# x = (1, -1), W = [[1, 2, 0], [0, 1, 1]], b = (-2, 0, 0.5): xW = (1, 1, -1), xW + b = (-1, 1, -0.5)
EXAMPLES = {
    "hedgehog": [
        *(value / (2 * E + 1 / E) for value in (E, E, 1 / E)),
        *(value / (2 / E + E) for value in (1 / E, 1 / E, E)),
    ],
    "elu": [2.0, 2.0, 1 / E],
    "t2r": [0.0, 1.0, 0.0],
}


def random_inputs(phi: FeatureMap, *, scale: float = 1.0):
    x = scale * torch.randn(2, 3, 5, 8, dtype=torch.float64)  # [B, H, T, D]
    weight = torch.randn(3, 8, 4, dtype=torch.float64)
    return x, weight, torch.randn(3, 4, dtype=torch.float64) if phi.has_bias else None


def test_the_settings_name_all_of_them():
    choices = get_type_hints(AttentionConfig)["feature_map"]
    names = {name for part in get_args(choices) for name in get_args(part)}
    assert names == set(FEATURE_MAPS) == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_definition(name):
    phi = get_feature_map(name)
    weight = torch.tensor([[[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]]])
    bias = torch.tensor([[-2.0, 0.0, 0.5]]) if phi.has_bias else None
    features = phi(torch.tensor([[[1.0, -1.0]]]), weight, bias)
    torch.testing.assert_close(features[0, 0], torch.tensor(EXAMPLES[name]))


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_features_are_finite_not_negative_and_as_many_as_said(name, scale):
    phi = get_feature_map(name)
    x, weight, bias = random_inputs(phi, scale=scale)
    features = phi(x, weight, bias)
    assert features.shape == (2, 3, 5, 4 * phi.multiple)
    assert torch.isfinite(features).all()
    assert (features >= 0).all()
    assert features.any()
    assert phi.default_dim(64) * phi.multiple == 64
    assert phi.default_dim(1) == 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_heads_do_not_mix(name):
    phi = get_feature_map(name)
    x, weight, bias = random_inputs(phi)
    together = phi(x, weight, bias)
    for head in range(3):
        part = slice(head, head + 1)
        alone = phi(x[:, part], weight[part], None if bias is None else bias[part])
        torch.testing.assert_close(together[:, part], alone)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown feature map 'hedge'; known: hedgehog, t2r, elu"):
        get_feature_map("hedge")
