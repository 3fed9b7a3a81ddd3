"""Writes that PyTorch does not count, and threads that share a model: nothing stale or of others is used."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from lolcats.modeling import residual_norms


@torch.no_grad()
def logits(model, *inputs):
    return model(*inputs, use_cache=False).logits


def test_weights_written_through_data_are_seen(model, kit):
    model.eval()
    input_ids = kit.tokens(2, 9)
    before = logits(model, input_ids)
    for _, layer in model.linear_layers():
        layer.window_factor.data += 2.0
    found = logits(model, input_ids)
    expected = model(input_ids, use_cache=False).logits  # with gradients nothing was ever kept
    assert torch.equal(found, expected)
    assert not torch.equal(found, before)


@pytest.mark.parametrize("when", ["during", "after"])
def test_a_norm_is_of_its_own_threads_sum(monkeypatch, when):
    """Two passes meet in one module: whichever writes last, each gets the norm of its own sum."""
    norm = nn.Identity()
    norm.forward = torch.square
    kept = residual_norms._NextNorm(norm)
    zero, one, two = (torch.tensor([value]) for value in (0.0, 1.0, 2.0))
    found = []

    def add_and_norm(norm, residual, x):
        if when == "during" and x is one:
            found.append(kept.add(residual, two))
        return residual + x, (residual + x).square()

    monkeypatch.setattr(residual_norms, "add_and_norm", add_and_norm)
    found.append(kept.add(zero, one))
    if when == "after":
        found.append(kept.add(zero, two))
    for total in found:
        assert torch.equal(kept.forward(total), total.square())
    found.clear()
    del total
    gc.collect()
    assert kept.kept is None
