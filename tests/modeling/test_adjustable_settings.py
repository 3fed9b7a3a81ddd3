"""Settings given to a model that was trained without them: a linear length cap."""

from __future__ import annotations

import pytest
import torch

from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.evaluation.load import load_model


@torch.no_grad()
def test_what_changes_and_what_does_not(make_linear, kit):
    tokens, model = kit.tokens(2, 40), make_linear(window="terraced", window_size=4)
    without = model(tokens).logits
    model.set_attention(linear_length_cap=20)
    changed = model(tokens).logits
    torch.testing.assert_close(changed[:, :20], without[:, :20])
    assert (changed[:, 21:] - without[:, 21:]).abs().max() > 1e-3
    model.set_attention(linear_length_cap=0)
    assert torch.equal(model(tokens).logits, without)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"linear_length_cap": -1}, "expected at least 0"), ({"window_size": 8}, "can be changed without training")],
)
def test_what_does_not_fit_changes_nothing(make_linear, settings, message):
    model = make_linear(window="sliding", window_size=4)
    before = model.config.attention
    with pytest.raises(ValueError, match=message):
        model.set_attention(**settings)
    assert model.config.attention == before


def test_conversion_and_loading_give_them(model_dir, tmp_path):
    base, tokenizer = load_model(model_dir)
    convert(base, AttentionConfig(window_size=4, linear_length_cap=9)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for given, expected in ((None, 9), (50, 50), (0, 0)):
        model, _ = load_model(tmp_path, linear_length_cap=given)
        for _, module in model.linear_layers():
            assert module.config.linear_length_cap == expected
    with pytest.raises(UserError, match="--linear-length-cap -1"):
        load_model(tmp_path, linear_length_cap=-1)
