"""Feature maps: names, shapes, large inputs."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
import torch

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.feature_maps import FEATURE_MAPS, get_feature_map


def test_the_settings_name_all_of_them():
    choices = get_type_hints(AttentionConfig)["feature_map"]
    assert {name for part in get_args(choices) for name in get_args(part)} == set(FEATURE_MAPS)
    with pytest.raises(ValueError, match="unknown feature map 'hedge'; known: hedgehog, t2r, elu"):
        get_feature_map("hedge")


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_features_are_finite_not_negative_and_as_many_as_said(name, scale):
    phi = get_feature_map(name)
    x, weight = scale * torch.randn(2, 3, 5, 8), torch.randn(3, 8, 4)
    features = phi(x, weight, torch.randn(3, 4) if phi.has_bias else None)
    assert features.shape == (2, 3, 5, 4 * phi.multiple)
    assert torch.isfinite(features).all()
    assert (features >= 0).all()
    assert features.any()
    assert phi.default_dim(64) * phi.multiple == 64
    assert phi.default_dim(1) == 1
