"""Settings given to a model that was trained without them: a sparse cache, a linear length cap."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.evaluation.load import load_model
from lolcats.generation.snapshot import model_fingerprint
from lolcats.modeling.call import SOFTMAX

# settings -> the tokens before which they change nothing, with two blocks of 4 in the window
CHANGES = {
    "sparse_cache": ({"sparse_cache": 6}, 8),
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
    without, before = model(tokens).logits, model_fingerprint(model)
    model.set_attention(**settings)
    changed = model(tokens).logits
    torch.testing.assert_close(changed[:, :first], without[:, :first])
    assert (changed[:, first + 1 :] - without[:, first + 1 :]).abs().max() > 1e-3
    assert model_fingerprint(model) != before
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, changed)
    model.set_attention(**dict.fromkeys(settings, 0))
    assert torch.equal(model(tokens).logits, without)


@torch.no_grad()
def test_a_sparse_cache_for_all_tokens_is_softmax_attention(make_linear, kit):
    model, tokens = make_linear(window="terraced", window_size=4), kit.tokens(2, 40)
    model.set_attention(sparse_cache=40)
    softmax = model(tokens, attention_call=SOFTMAX).logits
    torch.testing.assert_close(model(tokens).logits, softmax, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_generation_with_cache_equals_without(model, kit, padded):
    tokens = kit.tokens(3, 21)
    mask = kit.padding([21, 9, 14], 21) if padded else torch.ones_like(tokens)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(tokens, **options), model.generate(tokens, use_cache=False, **options))


@torch.no_grad()
def test_pieces_equal_the_whole_and_the_state_does_not_grow(model, kit):
    # No two alike in a row: equal values tie for the slots, and rounding would decide.
    tokens = torch.rand(2, kit.VOCABULARY, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :45]
    cache, sizes, logits = DynamicCache(config=model.config.get_text_config()), set(), []
    for piece in tokens.split([7, 1, 1, 20, 16], dim=1):
        logits.append(model(piece, past_key_values=cache, use_cache=True).logits)
        sizes.add(sum(layer.state.nbytes for layer in cache.layers))
    torch.testing.assert_close(torch.cat(logits, 1), model(tokens).logits, rtol=2e-4, atol=2e-4)
    assert len(sizes) == 1


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_the_cache_knows_when_a_block_may_leave_the_window(make_linear, kit, padded):
    """Without padding, all sequences are as long as the cache says."""
    model, tokens = make_linear(window="terraced", window_size=4, sparse_cache=6), kit.tokens(2, 20)
    mask = kit.padding([20, 19], 20)[:, :7] if padded else None
    cache = DynamicCache(config=model.config.get_text_config())
    model(tokens[:, :7], attention_mask=mask, past_key_values=cache, use_cache=True)
    for t in range(7, 20):
        assert cache.layers[0].block_evicted(model.config.attention) == (padded or t in (8, 12, 16))
        model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"sparse_cache": 3}, "needs a terraced window"), ({"window_size": 8}, "can be changed without training")],
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
        model, _ = load_model(tmp_path, linear_length_cap=given, sparse_cache=5)
        for _, module in model.linear_layers():
            assert (module.config.linear_length_cap, module.config.sparse_cache) == (expected, 5)
    for wrong in ({"linear_length_cap": -1}, {"sparse_cache": -1}):
        flag = next(iter(wrong)).replace("_", "-")
        with pytest.raises(UserError, match=f"--{flag} {next(iter(wrong.values()))}"):
            load_model(tmp_path, **wrong)
