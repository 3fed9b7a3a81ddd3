"""Losses over the vocabulary in parts against the plain formula, in float64 where the code allows it."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div

from lolcats.training.head import LanguageHead, weighted_cross_entropy, weighted_losses

WIDTH, VOCABULARY = 12, 37
HEADS = {"plain": {}, "softcap": {"softcap": 2.0}, "scaled": {"multiply": 0.3}, "divided": {"divide": 4.0}}


def make_head(bias=False, **options):
    module = nn.Linear(WIDTH, VOCABULARY, bias=bias).requires_grad_(False)
    nn.init.normal_(module.weight)
    return LanguageHead(module, **options)


def make_inputs(labels=23, width=WIDTH):
    features = torch.randn(labels, width, requires_grad=True)
    weight = torch.rand(labels)
    weight[::4] = 0.0
    return features, torch.randint(VOCABULARY, (labels,)), weight


def plain_loss(features, label, weight, head):
    return cross_entropy(head(features).float(), label, reduction="none") @ weight


def gradient(loss, tensor):
    return torch.autograd.grad(loss, tensor, retain_graph=True)[0]


def assert_same(found, expected, features):
    """Losses and their gradients."""
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient(3.0 * found, features), gradient(3.0 * expected, features))


@pytest.mark.parametrize("part", [1, 7, 23, 100])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("apart", [True, False])
def test_cross_entropy_in_parts(part, options, apart):
    head = make_head(bias=True, **options) if apart else LanguageHead(**options)
    features, label, weight = make_inputs(width=WIDTH if apart else VOCABULARY)
    loss = weighted_cross_entropy(features, label, weight, head, part=part)
    assert_same(loss, plain_loss(features, label, weight, head), features)
    with torch.no_grad():
        torch.testing.assert_close(weighted_cross_entropy(features, label, weight, head, part=part), loss)


@pytest.mark.parametrize("head", [make_head(), LanguageHead()], ids=["apart", "whole"])
def test_no_labels_at_all(head):
    features = torch.randn(0, WIDTH if head.module else VOCABULARY, requires_grad=True)
    empty = torch.zeros(0)
    loss = weighted_cross_entropy(features, empty.long(), empty, head, part=8)
    assert loss == 0


def test_small_weights_do_not_underflow_in_half_precision():
    head = make_head()
    head.module.half()
    features, label, _ = make_inputs()
    features = features.detach().half().requires_grad_()
    weight = torch.full((23,), 2.0**-12)
    loss = weighted_cross_entropy(features, label, weight, head, part=8)
    single = LanguageHead(nn.Linear(WIDTH, VOCABULARY, bias=False).requires_grad_(False))
    single.module.weight.data.copy_(head.module.weight)
    wide = features.detach().float().requires_grad_()
    expected = gradient(plain_loss(wide, label, weight, single), wide)
    # float16 has 11 bits; the logits (of size 10) and the products round
    torch.testing.assert_close(gradient(loss, features).float(), expected, rtol=3e-2, atol=2e-6)


@pytest.mark.parametrize("share", [0.3, 1])
@pytest.mark.parametrize("part", [4, 50])
def test_both_losses_in_parts(part, share):
    head = make_head(softcap=3.0)
    features, label, weight = make_inputs()
    teacher = torch.randn(23, WIDTH)
    student, target = (head(x).log_softmax(-1) for x in (features, teacher))
    divergence = kl_div(student, target, reduction="none", log_target=True).sum(-1) @ weight
    entropy = plain_loss(features, label, weight, head)
    found = weighted_losses(features, teacher, label, weight, head, share=share, part=part)
    torch.testing.assert_close(found[1:], (entropy.detach(), divergence.detach()))
    assert_same(found[0], (1 - share) * entropy + share * divergence, features)
