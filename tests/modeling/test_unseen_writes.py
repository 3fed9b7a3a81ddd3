"""Writes that PyTorch does not count: nothing stale is used."""

from __future__ import annotations

import torch


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
