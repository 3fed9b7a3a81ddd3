"""The cache layer: what transformers calls on it, mixed caches, and states that must not be shared."""

import pytest
import torch
from family_models import TOLERANCE
from transformers import DynamicCache, StaticCache

from lolcats.modeling.attention import SOFTMAX, AttentionCall
from lolcats.modeling.cache import ExactCacheLayer


@pytest.fixture
def filled(make_linear, kit):
    """(model, tokens, a cache that holds the first 10 of them)."""
    model, input_ids = make_linear(), kit.tokens(2, 16)
    _, cache = kit.in_pieces(model, input_ids[:, :10], [10])
    return model, input_ids, cache


def snapshot(cache):
    return [layer.state.clone()._asdict() for layer in cache.layers]


def same(cache, tensors):
    return all(
        torch.equal(now, before[name])
        for layer, before in zip(cache.layers, tensors, strict=True)
        for name, now in layer.state._asdict().items()
    )


@torch.no_grad()
def test_static_caches_are_refused_and_generate_does_without(make_linear, kit):
    model, input_ids = make_linear(exact=[0]), kit.tokens(1, 9)
    for call in (AttentionCall(), SOFTMAX):
        cache = StaticCache(config=model.config.get_text_config(), max_cache_len=12)
        with pytest.raises(ValueError, match="use a DynamicCache"):
            model(input_ids, past_key_values=cache, attention_call=call)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(input_ids, **settings)
    assert torch.equal(model.generate(input_ids, cache_implementation="static", **settings), expected)


@pytest.mark.parametrize("inference", [False, True])
def test_a_cache_without_a_config_or_from_inference_mode_works(filled, inference):
    model, input_ids, _ = filled
    cache = DynamicCache()
    with torch.inference_mode(inference), torch.no_grad():
        model(input_ids[:, :10], past_key_values=cache)
    with torch.no_grad():
        logits = [model(input_ids[:, i : i + 1], past_key_values=cache).logits for i in range(10, 16)]
        whole = model(input_ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(logits, 1), whole[:, 10:], **TOLERANCE)


def test_offloading_keeps_the_state(filled):
    _, _, cache = filled
    before = snapshot(cache)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert same(cache, before)


def test_crop_is_rejected(filled):
    _, _, cache = filled
    before = snapshot(cache)
    for tokens in (-1, 3):
        with pytest.raises(ValueError, match="linear states cannot forget tokens"):
            cache.crop(tokens)
    assert same(cache, before)


def test_decoding_writes_in_place_only_without_autograd(filled):
    model, input_ids, cache = filled
    with torch.no_grad():
        storage = cache.layers[0].state.S.data_ptr()
        model(input_ids[:, 10:11], past_key_values=cache)
        assert cache.layers[0].state.S.data_ptr() == storage
    before = snapshot(cache)
    held = [layer.state for layer in cache.layers]
    out = model(input_ids[:, 11:12], past_key_values=cache, use_cache=True)
    for state, tensors in zip(held, before, strict=True):
        assert all(torch.equal(state._asdict()[name], tensor) for name, tensor in tensors.items())
    # the state now belongs to a graph: decoding on without autograd must not overwrite what backward needs
    with torch.no_grad():
        model(input_ids[:, 12:13], past_key_values=cache)
    out.logits.sum().backward()
    assert next(model.linear_layers())[1].q_weight.grad is not None


@torch.no_grad()
def test_modes_do_not_share_a_cache(filled):
    model, input_ids, cache = filled
    with pytest.raises(ValueError, match="another model or mode"):
        model(input_ids[:, 10:], past_key_values=cache, attention_call=SOFTMAX)
    softmax_cache = DynamicCache(config=model.config.get_text_config())
    model(input_ids[:, :10], past_key_values=softmax_cache, attention_call=SOFTMAX)
    with pytest.raises(ValueError, match="start with an empty cache"):
        model(input_ids[:, 10:], past_key_values=softmax_cache)
    cache.reset()
    model(input_ids[:, :10], past_key_values=cache, attention_call=SOFTMAX)
    assert all(type(layer) is ExactCacheLayer for layer in cache.layers)


@torch.no_grad()
def test_a_missing_hook_is_an_error_not_a_wrong_answer(make_linear, kit):
    model, input_ids = make_linear(), kit.tokens(1, 8)
    for _, module in model.model.named_modules():
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()
    cache = DynamicCache()
    model(input_ids[:, :4], past_key_values=cache)
    with pytest.raises(RuntimeError, match="cache hook is missing"):
        model(input_ids[:, 4:], past_key_values=cache)
