"""Feature maps: definitions, shapes, registry."""

from __future__ import annotations

import math

import pytest
import torch

from lolcats.ops.hybrid_attention import feature_maps
from lolcats.ops.hybrid_attention.feature_maps import FeatureMap, feature_map_names, get_feature_map, register

NAMES = ("elu", "exp", "hedgehog", "hedgehog_bias", "t2r")
E = math.e

# x = (1, -1), W = [[1, 2, 0], [0, 1, 1]], b = (-2, 0, 0.5): xW = (1, 1, -1), xW + b = (-1, 1, -0.5)
EXAMPLES = {
    "hedgehog": [
        *(value / (2 * E + 1 / E) for value in (E, E, 1 / E)),
        *(value / (2 / E + E) for value in (1 / E, 1 / E, E)),
    ],
    "hedgehog_bias": [  # of (-1, 1, -0.5)
        *(math.exp(u) / (1 / E + E + E**-0.5) for u in (-1, 1, -0.5)),
        *(math.exp(-u) / (E + 1 / E + E**0.5) for u in (-1, 1, -0.5)),
    ],
    "exp": [1.0, 1.0, E**-2, E**-2, E**-2, 1.0],
    "elu": [2.0, 2.0, 1 / E],
    "t2r": [0.0, 1.0, 0.0],
}


def random_inputs(phi: FeatureMap, *, scale: float = 1.0):
    x = scale * torch.randn(2, 3, 5, 8, dtype=torch.float64)  # [B, H, T, D]
    weight = torch.randn(3, 8, 4, dtype=torch.float64)
    bias = torch.randn(3, 4, dtype=torch.float64) if phi.has_bias else None
    return x, weight, bias


def test_names_are_sorted_and_complete() -> None:
    assert feature_map_names() == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_shape_is_columns_times_multiple(name: str) -> None:
    phi = get_feature_map(name)
    x, weight, bias = random_inputs(phi)
    assert phi(x, weight, bias).shape == (2, 3, 5, 4 * phi.multiple)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_features_are_finite_and_not_negative(name: str, scale: float) -> None:
    phi = get_feature_map(name)
    x, weight, bias = random_inputs(phi, scale=scale)
    features = phi(x, weight, bias)
    assert torch.isfinite(features).all()
    assert (features >= 0).all()
    assert features.any()


@pytest.mark.parametrize("name", NAMES)
def test_definition_on_an_example_by_hand(name: str) -> None:
    phi = get_feature_map(name)
    x = torch.tensor([[[1.0, -1.0]]], dtype=torch.float64)
    weight = torch.tensor([[[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]]], dtype=torch.float64)
    bias = torch.tensor([[-2.0, 0.0, 0.5]], dtype=torch.float64) if phi.has_bias else None
    expected = torch.tensor(EXAMPLES[name], dtype=torch.float64)
    torch.testing.assert_close(phi(x, weight, bias)[0, 0], expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_every_head_has_its_own_weights(name: str) -> None:
    phi = get_feature_map(name)
    x, weight, bias = random_inputs(phi)
    together = phi(x, weight, bias)
    for h in range(3):
        alone = phi(x[:, h : h + 1], weight[h : h + 1], None if bias is None else bias[h : h + 1])
        torch.testing.assert_close(together[:, h : h + 1], alone)


def test_hedgehog_halves_are_distributions() -> None:
    x, weight, _ = random_inputs(get_feature_map("hedgehog"))
    features = get_feature_map("hedgehog")(x, weight)
    torch.testing.assert_close(features.unflatten(-1, (2, 4)).sum(-1), torch.ones(2, 3, 5, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "columns"), [("hedgehog", 32), ("hedgehog_bias", 32), ("exp", 32), ("elu", 64), ("t2r", 64)]
)
def test_default_dim_gives_head_dim_features(name: str, columns: int) -> None:
    assert get_feature_map(name).default_dim(64) == columns
    assert get_feature_map(name).default_dim(1) == 1


def test_two_maps_learn_a_bias() -> None:
    assert [name for name in NAMES if get_feature_map(name).has_bias] == ["hedgehog_bias", "t2r"]


def test_hedgehog_with_zero_bias_is_hedgehog() -> None:
    x, weight, bias = random_inputs(get_feature_map("hedgehog_bias"))
    plain = get_feature_map("hedgehog")(x, weight)
    assert torch.equal(get_feature_map("hedgehog_bias")(x, weight, torch.zeros_like(bias)), plain)
    assert not torch.isclose(get_feature_map("hedgehog_bias")(x, weight, bias), plain).any()


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown feature map 'hedge'; known: elu, exp, hedgehog, hedgehog_bias, t2r"):
        get_feature_map("hedge")


def test_a_new_map_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_maps, "_REGISTRY", dict(feature_maps._REGISTRY))

    @register("square")
    class Square(FeatureMap):
        def activation(self, x_P):
            return x_P.square()

    assert "square" in feature_map_names()
    x, weight, _ = random_inputs(Square())
    torch.testing.assert_close(get_feature_map("square")(x, weight), (x @ weight) ** 2)


def test_duplicate_names_are_rejected() -> None:
    with pytest.raises(ValueError, match="'elu' is already registered by Elu"):
        register("elu")(FeatureMap)


def test_a_map_without_activation_says_so() -> None:
    class Nothing(FeatureMap):
        pass

    with pytest.raises(TypeError, match=r"abstract class Nothing .*activation"):
        Nothing()
