"""The losses of attention transfer and the weights they are about: those of their definitions."""

from __future__ import annotations

import pytest
import torch
from hybrid_cases import (
    GRADIENT_TOLERANCE,
    SHARES,
    SPECS,
    TOLERANCE,
    Case,
    assert_near,
    make_case,
    reference,
)
from hybrid_checks import plain_softmax

from lolcats.config.attention import AttentionConfig
from lolcats.ops import attention_weights, hybrid_attention, output_mse, weights_cross_entropy
from lolcats.ops.hybrid_attention.params import DENOMINATOR_FLOOR

SCALE = 0.4
NAMES = list(SPECS)
TOKENS, BLOCK = 70, 32  # the last block is shorter
LAYOUTS = {
    "whole": {},
    "softcap": {"softcap": 2.0},
    "packed": {"cu_seqlens": torch.tensor([0, 31, 31, 39, 60]), "sliding_window": 5},
}


def weights(case: Case, softcap=None, **options):
    params = case.params._replace(scale=SCALE, softcap=softcap)
    return attention_weights(case.q, case.k, case.spec, params, **options)


def definition(q, k, spec, params, *, block, **options):
    hybrid, softmax, length_N = attention_weights(q, k, spec, params, **options)
    cross_NHL = -(softmax.detach() * hybrid.clamp_min(DENOMINATOR_FLOOR).log()).sum(-1)
    real_N1L = (torch.arange(cross_NHL.shape[2]) < length_N[:, None])[:, None]
    return (cross_NHL * real_N1L).sum() / (real_N1L.sum() * cross_NHL.shape[1])


def value_and_gradients(function, case: Case, softcap=None, **options) -> dict[str, torch.Tensor]:
    leaves = case.map(lambda tensor: tensor.detach().clone().requires_grad_())
    params = leaves.params._replace(scale=SCALE, softcap=softcap)
    loss = function(leaves.q, leaves.k, leaves.spec, params, block=BLOCK, **options)
    named = leaves.tensors()
    gradients = torch.autograd.grad(1.7 * loss, list(named.values()), allow_unused=True)
    return {"loss": loss.detach()} | {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(named.items(), gradients, strict=True)
    }


def check_same_as_definition(case: Case, **options) -> None:
    found = value_and_gradients(weights_cross_entropy, case, **options)
    for name, tensor in value_and_gradients(definition, case.map(torch.Tensor.double), **options).items():
        tolerance = (TOLERANCE if name == "loss" else GRADIENT_TOLERANCE)[case.q.dtype]
        assert_near(found[name].double(), tensor, tolerance, name, floor=1e-2)  # gradients of gamma may cancel


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_cross_entropy_is_its_definition(name, layout):
    share = SHARES[NAMES.index(name) % 2]
    batch = 1 if layout == "packed" else 2
    sizes = {"repeats": 2, "share_state": share, "sink_logits": layout == "softcap"}
    case = make_case(SPECS[name], TOKENS, batch=batch, **sizes)
    check_same_as_definition(case, **LAYOUTS[layout])


@pytest.mark.parametrize("name", ["terraced-4", "sliding-70-sinks-3", "linear"])
def test_cross_entropy_in_float32(name):
    check_same_as_definition(make_case(SPECS[name], TOKENS, repeats=2, dtype=torch.float32, sink_logits=True))


def test_weights_below_the_floor():
    """Of exactly zero, among them all those of a query, and smaller than the floor."""
    zero = make_case(AttentionConfig("sliding", 0, feature_map="t2r"), TOKENS, columns=2)
    hybrid, softmax, _ = weights(zero)
    assert (softmax[hybrid < DENOMINATOR_FLOOR] > 0).any()
    assert not hybrid.sum(-1).all()
    check_same_as_definition(zero)


def test_cross_entropy_without_autograd_and_what_it_keeps():
    case = make_case(SPECS["terraced-4"], 600, batch=1)
    arguments = (case.q, case.k, case.spec, case.params)
    with torch.no_grad():
        value = weights_cross_entropy(*arguments)
    case.params.k_weight.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()), lambda _: None):
        again = weights_cross_entropy(*arguments)
    torch.testing.assert_close(value, again.detach())
    assert 0 < max(saved) <= case.q.numel()  # no matrix of weights


def test_unused_gamma_has_no_gradient():
    """Not one of zeros, with which weight decay would change it."""
    case = make_case(SPECS["linear"], TOKENS).map(lambda tensor: tensor.requires_grad_())
    weights_cross_entropy(case.q.detach(), case.k.detach(), case.spec, case.params).backward()
    assert case.params.gamma.grad is None
    assert case.params.q_weight.grad.any()


def test_cross_entropy_is_least_where_the_weights_agree():
    """With a window that holds everything it is the entropy of softmax attention (Gibbs' inequality)."""
    wide = make_case(SPECS["terraced-64"], 40)
    entropy = torch.special.entr(weights(wide)[1]).sum(-1).mean().item()
    loss = weights_cross_entropy(wide.q, wide.k, wide.spec, wide.params._replace(scale=SCALE))
    assert loss.item() == pytest.approx(entropy, rel=1e-12)
    narrow = make_case(SPECS["terraced-4"], 40)
    loss = weights_cross_entropy(narrow.q, narrow.k, narrow.spec, narrow.params._replace(scale=SCALE))
    assert loss.item() > entropy + 0.01


@pytest.mark.parametrize("name", NAMES)
def test_weights_times_values_are_the_outputs(name):
    case = make_case(SPECS[name], 60, repeats=3, sink_logits=True)
    hybrid, softmax, lengths = weights(case, softcap=2.0)
    v = case.v.repeat_interleave(3, 1)
    assert lengths.tolist() == [60, 60]
    assert_near(hybrid @ v, case.run(reference, scale=SCALE, softcap=2.0)[0], 1e-11, "hybrid")
    assert_near(softmax @ v, plain_softmax(case, scale=SCALE, softcap=2.0), 1e-11, "softmax")
    assert not hybrid.triu(1).any()
    assert not softmax.triu(1).any()


def test_rows_are_the_packed_sequences_alone():
    case = make_case(SPECS["terraced-4"], 50, batch=1)
    cu_seqlens = torch.tensor([0, 30, 30, 47])
    found = weights(case, cu_seqlens=cu_seqlens, sliding_window=5)
    assert found[2].tolist() == [30, 0, 17]
    for n in (0, 2):
        alone = case.part(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))
        for weight, expected in zip(found[:2], weights(alone, sliding_window=5)[:2], strict=True):
            assert_near(weight[n : n + 1, :, : alone.tokens, : alone.tokens], expected, 1e-12, f"sequence {n}")
    distance = torch.arange(30)[:, None] - torch.arange(30)
    inside = ((distance >= 0) & (distance < 5)).expand(2, -1, -1)
    assert torch.equal(found[1][0] > 0, inside)


@pytest.mark.parametrize("layout", ["whole", "packed"])
def test_output_mse_is_the_mean_over_real_tokens(layout):
    batch = 1 if layout == "packed" else 2
    case = make_case(SPECS["terraced-4"], TOKENS, batch=batch, repeats=2, dtype=torch.float32)
    options = {key: value for key, value in LAYOUTS[layout].items() if key != "sliding_window"}
    target = torch.randn_like(case.q)
    y, _ = hybrid_attention(case.q, case.k, case.v, case.spec, case.params, **options)
    expected = (y - target)[:, :, : 60 if layout == "packed" else TOKENS].square().mean()
    found = output_mse(case.q, case.k, case.v, target, case.spec, case.params, **options)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="target: expected q's shape"):
        output_mse(case.q, case.k, case.v, target[:, :2], case.spec, case.params)
