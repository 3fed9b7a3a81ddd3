"""Settings given to a model that was trained without them: a linear length cap."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.evaluation.load import load_model

# settings -> the tokens before which they change nothing, with two blocks of 4 in the window
CHANGES = {
    "cap": ({"linear_length_cap": 20}, 20),
}


@pytest.fixture(params=list(CHANGES))
def change(request):
    return CHANGES[request.param]


@pytest.fixture
def model(change, make_linear):
    made = make_linear(window="terraced", window_size=4)
    made.set_attention(**change[0])
    return made


@torch.no_grad()
def test_what_changes_and_what_does_not(change, make_linear, kit, tmp_path):
    (settings, first), tokens = change, kit.tokens(2, 40)
    model = make_linear(window="terraced", window_size=4)
    without = model(tokens).logits
    model.set_attention(**settings)
    changed = model(tokens).logits
    torch.testing.assert_close(changed[:, :first], without[:, :first])
    assert (changed[:, first + 1 :] - without[:, first + 1 :]).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, changed)
    model.set_attention(**dict.fromkeys(settings, 0))
    assert torch.equal(model(tokens).logits, without)


@pytest.mark.parametrize("padded", [False, True])
def test_generation_with_cache_equals_without(model, kit, padded):
    tokens = kit.tokens(3, 21)
    mask = kit.padding([21, 9, 14], 21) if padded else torch.ones_like(tokens)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(tokens, **options), model.generate(tokens, use_cache=False, **options))


@torch.no_grad()
def test_pieces_equal_the_whole_and_the_state_does_not_grow(model, kit):
    tokens = kit.tokens(2, 45)
    cache, sizes, logits = DynamicCache(config=model.config.get_text_config()), set(), []
    for piece in tokens.split([7, 1, 1, 20, 16], dim=1):
        logits.append(model(piece, past_key_values=cache, use_cache=True).logits)
        sizes.add(sum(layer.state.nbytes for layer in cache.layers))
    torch.testing.assert_close(torch.cat(logits, 1), model(tokens).logits, rtol=2e-4, atol=2e-4)
    assert len(sizes) == 1


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
