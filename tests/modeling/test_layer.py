"""The parameters of one layer: initial values, shapes, types, and that forward is the operator."""

from dataclasses import replace

import pytest
import torch

from lolcats.config.attention import AttentionConfig
from lolcats.modeling.layer import HybridAttention
from lolcats.ops import Scoring, hybrid_attention, weights_cross_entropy


def make_layer(config: AttentionConfig | None = None, **settings):
    return HybridAttention(replace(config or AttentionConfig("terraced", 4), **settings), 6, 2, 8)


@torch.no_grad()
def trained_layer(config: AttentionConfig | None = None, **settings):
    """With random parameters, another set for every head."""
    layer = make_layer(config, **settings)
    for parameter in layer.parameters():
        parameter.normal_()
    return layer


def random_qkv(tokens: int = 20, dtype: torch.dtype = torch.float32):
    q = torch.randn(2, 6, tokens, 8).to(dtype)
    k, v = (torch.randn(2, 2, tokens, 8).to(dtype) for _ in range(2))
    return q, k, v


def test_without_a_linear_part_only_the_window_factor_is_learned() -> None:
    layer = make_layer(AttentionConfig("terraced", 4, feature_map=None))
    assert list(layer.state_dict()) == ["window_factor"]
    y, _ = layer(*random_qkv())
    assert y.shape == (2, 6, 20, 8)


@pytest.mark.parametrize("columns", [3, 8])
def test_initial_weights(columns: int) -> None:
    """A truncated identity; biases are zero; in float32, also when it is done again."""
    config = AttentionConfig("terraced", 4, feature_map="t2r")
    settings = {"feature_dim": columns, "window_gamma": 0.25}
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = make_layer(config, **settings)
    finally:
        torch.set_default_dtype(torch.float32)
    for parameter in layer.parameters():
        parameter.data.fill_(9.0)
    layer.reset_parameters()
    torch.testing.assert_close(layer.params().gamma, torch.full((6,), 0.25))
    for weight, bias in ((layer.q_weight, layer.q_bias), (layer.k_weight, layer.k_bias)):
        assert torch.equal(weight, torch.eye(8, columns).expand_as(weight))
        assert not bias.any()


@pytest.mark.parametrize("feature_map", ["hedgehog", "t2r", None])
@pytest.mark.parametrize("share_state", ["kv_head", "query_head"])
def test_forward_is_the_operator(feature_map: str | None, share_state: str) -> None:
    """Every option reaches it."""
    config = AttentionConfig("sliding", 5, sinks=1, feature_map=feature_map)
    layer = trained_layer(config, share_state=share_state)
    q, k, v = random_qkv()
    scoring = Scoring(torch.randn(6), scale=0.5, softcap=2.0)
    _, state = layer(q, k, v, scoring, return_state=True)
    given = {"state": state, "return_state": True}
    y, after = layer(q, k, v, scoring, **given)
    params = layer.params(scoring)
    expected, expected_after = hybrid_attention(q, k, v, layer.config, params, backend="chunked", **given)
    # float32 sums of 40 terms
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.S, expected_after.S, rtol=1e-4, atol=1e-5)


def test_values_narrower_than_keys() -> None:
    """Outputs are linear in the values: the columns of wider ones, and their mean squared error."""
    layer = make_layer(AttentionConfig("sliding", 5))
    q, k, v = random_qkv()
    y, state = layer(q, k, v, return_state=True)
    narrow, after = layer(q, k, v[..., :5], return_state=True)
    torch.testing.assert_close(narrow, y[..., :5])
    torch.testing.assert_close(after.S[..., :5], state.S[..., :5])
    target = torch.randn_like(narrow)
    loss = layer.output_mse(q, k, v[..., :5], target)
    torch.testing.assert_close(loss, (narrow - target).square().mean())


def test_cross_entropy_is_the_operator() -> None:
    layer = trained_layer()
    q, k = random_qkv()[:2]
    scoring = Scoring(torch.randn(6), softcap=2.0)
    loss = layer.weights_cross_entropy(q, k, scoring, 7)
    params = layer.params(scoring)
    assert loss.shape == ()
    expected = weights_cross_entropy(q, k, layer.config, params, sliding_window=7)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(parameter.grad.any() for parameter in layer.parameters())
