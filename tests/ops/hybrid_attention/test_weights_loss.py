"""Cross-entropy of weights, value and gradients: those of its definition, written out with `attention_weights`."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from hybrid_cases import GRADIENT_TOLERANCE, SHARES, SPECS, TOLERANCE, Case, assert_near, make_case, random_mask

from lolcats.config.attention import AttentionConfig
from lolcats.ops import attention_weights, weights_cross_entropy
from lolcats.ops.hybrid_attention.params import DENOMINATOR_FLOOR

WEIGHTS_LOSS = import_module("lolcats.ops.hybrid_attention.weights_loss")
NAMES = [name for name, spec in SPECS.items() if not (spec.sparse_cache or spec.is_retention)]
TOKENS, BLOCK = 90, 32  # the last block is shorter
DOCUMENTS = torch.tensor([[0] * 41 + [1] * 49, [2] * 7 + [3] * 60 + [-1] * 23])
LAYOUTS = {
    "whole": {},
    "sliding teacher": {"sliding_window": 5},
    "softcap": {"softcap": 2.0},
    "padding": {"mask": random_mask(2, TOKENS, "left", seed=4)},
    "holes": {"mask": random_mask(2, TOKENS, "holes", seed=4), "sliding_window": 20},
    "documents": {"segment_ids": DOCUMENTS},
}


def definition(q, k, spec, params, *, block, **options):
    hybrid, softmax, length_N = attention_weights(q, k, spec, params, **options)
    cross_NHL = -(softmax.detach() * hybrid.clamp_min(DENOMINATOR_FLOOR).log()).sum(-1)
    real_N1L = (torch.arange(cross_NHL.shape[2]) < length_N[:, None])[:, None]
    return (cross_NHL * real_N1L).sum() / (real_N1L.sum() * cross_NHL.shape[1])


def value_and_gradients(function, case: Case, wanted: set[str], **options) -> dict[str, torch.Tensor]:
    case = case.map(lambda tensor: tensor.detach().clone())
    leaves = {name: tensor.requires_grad_() for name, tensor in case.tensors().items() if name in wanted}
    loss = function(case.q, case.k, case.spec, case.params, scale=0.4, block=BLOCK, **options)
    gradients = torch.autograd.grad(1.7 * loss, list(leaves.values()), allow_unused=True)
    return {"loss": loss.detach()} | {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }


def check_same_as_definition(case: Case, *, others: bool = False, **options) -> None:
    """Value and gradients of the parameters, with `others` also of queries, keys and sink logits."""
    wanted = {"gamma", "q_weight", "k_weight", "q_bias", "k_bias"} | ({"q", "k", "sink_logits"} if others else set())
    found = value_and_gradients(weights_cross_entropy, case, wanted, **options)
    expected = value_and_gradients(definition, case.map(lambda tensor: tensor.double()), wanted, **options)
    for name, tensor in expected.items():
        tolerance = (TOLERANCE if name == "loss" else GRADIENT_TOLERANCE)[case.q.dtype]
        assert_near(found[name].double(), tensor, tolerance, name)


def zero_weights() -> Case:
    """With weights of exactly zero, among them all those of a query."""
    case = make_case(AttentionConfig("sliding", 0, feature_map="t2r"), TOKENS, columns=2)
    hybrid, softmax, _ = attention_weights(case.q, case.k, case.spec, case.params, scale=0.4)
    assert (softmax[hybrid < DENOMINATOR_FLOOR] > 0).any()
    assert not hybrid.sum(-1).all()
    return case


def tiny_weights() -> Case:
    """Some below the floor, but not zero."""
    case = make_case(SPECS["terraced-4"], TOKENS)
    params = case.params._replace(q_weight=8 * case.params.q_weight, k_weight=8 * case.params.k_weight)
    case = Case(case.spec, case.q, case.k, case.v, params)
    hybrid, softmax, _ = attention_weights(case.q, case.k, case.spec, case.params, scale=0.4)
    assert (softmax[(hybrid > 0) & (hybrid < DENOMINATOR_FLOOR)] > 0).any()
    return case


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_is_its_definition(name: str, layout: str) -> None:
    case = make_case(SPECS[name], TOKENS, repeats=2, sink_logits=layout == "softcap")
    check_same_as_definition(case, **LAYOUTS[layout])


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("share_state", SHARES)
@pytest.mark.parametrize("name", ["terraced-16-one-block-sinks-2", "terraced-16-t2r", "linear", "terraced-5-sinks-70"])
def test_shared_states_and_gradients_of_all_inputs(name: str, share_state: str, others: bool) -> None:
    case = make_case(SPECS[name], TOKENS, repeats=3, share_state=share_state, sink_logits=True)
    check_same_as_definition(case, others=others, softcap=2.0, sliding_window=40, mask=LAYOUTS["padding"]["mask"])


@pytest.mark.parametrize("make", [zero_weights, tiny_weights])
def test_weights_below_the_floor(make) -> None:
    check_same_as_definition(make())


# Not with ReLU features: gradients contain 1 / weight, of weights that are all rounding next to zero.
@pytest.mark.parametrize("name", ["terraced-4", "sliding-70-sinks-3", "sliding-16-exp", "linear"])
def test_float32(name: str) -> None:
    check_same_as_definition(make_case(SPECS[name], TOKENS, repeats=2, dtype=torch.float32, sink_logits=True))


def test_value_without_autograd() -> None:
    case = make_case(SPECS["terraced-4"], TOKENS)
    case.params.q_weight.requires_grad_()
    with torch.no_grad():
        value = weights_cross_entropy(case.q, case.k, case.spec, case.params, scale=0.4)
    assert not value.requires_grad
    assert torch.equal(value, weights_cross_entropy(case.q, case.k, case.spec, case.params, scale=0.4).detach())


def test_unused_gamma_has_no_gradient() -> None:
    """Not one of zeros, with which weight decay would change it."""
    case = make_case(SPECS["linear"], TOKENS).map(lambda tensor: tensor.requires_grad_())
    q, k = case.q.detach(), case.k.detach()
    weights_cross_entropy(q, k, case.spec, case.params, scale=0.4).backward()
    assert case.params.gamma.grad is None
    assert case.params.q_weight.grad.any()


def test_no_matrix_of_weights_is_kept() -> None:
    case = make_case(SPECS["terraced-4"], 600, batch=1)
    case.params.k_weight.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()), lambda _: None):
        weights_cross_entropy(case.q, case.k, case.spec, case.params, scale=0.4)
    assert 0 < max(saved) <= case.q.numel()


def floor_passes_gradients(monkeypatch) -> Case:
    monkeypatch.setattr(torch, "threshold_", lambda x, *_: x)
    return tiny_weights()


def window_is_linear_too(monkeypatch) -> Case:
    monkeypatch.setattr(WEIGHTS_LOSS._Columns, "linear_only_", lambda self, x: x)
    return make_case(SPECS["terraced-4"], TOKENS)


def sum_is_a_constant(monkeypatch) -> Case:
    """Its derivative vanishes as if all sums were below the floor."""
    monkeypatch.setattr(torch.Tensor, "__ge__", lambda x, _: torch.zeros_like(x, dtype=torch.bool))
    return make_case(AttentionConfig("sliding", 0), TOKENS)


@pytest.mark.parametrize("fault", [floor_passes_gradients, window_is_linear_too, sum_is_a_constant])
def test_wrong_variants_are_noticed(fault, monkeypatch) -> None:
    case = fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"relative error|not finite"):
        check_same_as_definition(case)
