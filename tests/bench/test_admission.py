"""benchmarks/admission.py: what its rules keep."""

from __future__ import annotations

import admission
import torch
from torch.nn.functional import scaled_dot_product_attention as softmax


def test_rules_of_admission():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 300, 8), torch.randn(2, 2, 300, 8), torch.randn(2, 2, 300, 8)
    plain = softmax(q, k, v, is_causal=True, enable_gqa=True)
    call = {"scale": 8**-0.5, "recent": 20}

    def bounded(budgets, rule, predicted=None):
        return admission.bounded_attention(q, k, v, budgets=budgets, rule=rule, predicted=predicted, **call)

    assert torch.allclose(bounded([300, 300], "last"), plain, atol=1e-5)
    # A block of 64 queries sees the first token and the 99 last ones before it.
    sees = torch.ones(300, 300).tril().bool()
    for begin in range(64, 300, 64):
        sees[begin : begin + 64, 1 : max(begin - 99, 1)] = False
    expected = softmax(q, k, v, attn_mask=sees, enable_gqa=True)
    assert torch.allclose(bounded([100, 100], "last"), expected, atol=1e-5)
    assert torch.allclose(bounded([100, 100], "predicted", torch.arange(300.0).expand(2, 2, -1)), expected, atol=1e-5)
    # Heads have budgets of their own; the other one is as before.
    uneven = bounded([100, 60], "last")
    assert torch.allclose(uneven[:, :2], expected[:, :2], atol=1e-5)
    assert not torch.allclose(uneven[:, 2:], expected[:, 2:])
    assert not torch.allclose(bounded([100, 100], "sum"), expected)
