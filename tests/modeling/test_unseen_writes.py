"""Writes that PyTorch does not count: nothing stale is used."""

from __future__ import annotations

import torch


def test_weights_written_through_data_are_seen(model, kit):
    model.eval()
    input_ids = kit.tokens(2, 9)
    with torch.no_grad():
        before = model(input_ids, use_cache=False).logits
    for _, layer in model.linear_layers():
        layer.window_factor.data += 2.0
    with torch.no_grad():
        found = model(input_ids, use_cache=False).logits
    expected = model(input_ids, use_cache=False).logits  # with gradients nothing was ever kept
    assert torch.equal(found, expected)
    assert not torch.equal(found, before)
