"""The cache layer: what transformers calls on it, mixed caches, and states that must not be shared."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from lolcats.modeling.cache import HybridCacheLayer, UntracedLayer, UntracedSlidingLayer
from lolcats.modeling.call import SOFTMAX

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}  # float32, the same sums in another order


@pytest.fixture
def filled(make_linear, kit):
    """(model, tokens, a cache that holds the first 10 of them)."""
    model, input_ids = make_linear(), kit.tokens(2, 16)
    _, cache = kit.in_pieces(model, input_ids[:, :10], [10])
    return model, input_ids, cache


def snapshot(cache):
    return [layer.state.clone().tensors() for layer in cache.layers]


def same(cache, tensors):
    return all(
        torch.equal(now, before[name])
        for layer, before in zip(cache.layers, tensors, strict=True)
        for name, now in layer.state.tensors().items()
    )


@torch.no_grad()
def test_memory_does_not_grow(filled, kit):
    model, input_ids, cache = filled
    size = [layer.state.nbytes for layer in cache.layers]
    model(input_ids[:, 10:], past_key_values=cache)
    assert [layer.state.nbytes for layer in cache.layers] == size
    assert cache.get_seq_length() == 16
    assert cache.layers[0].keys is None


@torch.no_grad()
@pytest.mark.parametrize("keep", [[0], [1]])
def test_softmax_layers_share_the_cache_object(make_linear, kit, keep):
    model, input_ids = make_linear(exact=keep), kit.tokens(2, 20)
    whole = model(input_ids, use_cache=False).logits
    pieces, cache = kit.in_pieces(model, input_ids, [6, 5, *[1] * 9])
    torch.testing.assert_close(pieces, whole, **TOLERANCE)
    kinds = [DynamicLayer if index in keep else HybridCacheLayer for index in range(2)]
    assert [type(layer) for layer in cache.layers] == kinds
    assert cache.layers[keep[0]].keys.shape[2] == 20
    mask = kit.padding([20, 8], 20)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    whole = model(input_ids, attention_mask=mask, position_ids=positions).logits
    pieces, _ = kit.in_pieces(model, input_ids, [3, 12, *[1] * 5], mask)
    torch.testing.assert_close(pieces[mask.bool()], whole[mask.bool()], **TOLERANCE)


def static_cache(model, length):
    return StaticCache(config=model.config.get_text_config(), max_cache_len=length)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama3", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_static_cache_serves_both_kinds_of_layers(kit, family, padded):
    model, input_ids = kit.linearized(kit.build(family), window_size=3, exact=[0]), kit.tokens(2, 20)
    mask = kit.padding([20, 16 if padded else 20], 20)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    whole = model(input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache, begin, logits = static_cache(model, 24), 0, []
    for end in (6, 11, *range(12, 21)):
        piece = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        logits.append(model(input_ids[:, begin:end], past_key_values=cache, **piece).logits)
        begin = end
        assert cache.get_seq_length() == end
    real = mask.bool()
    torch.testing.assert_close(torch.cat(logits, 1)[real], whole[real], **TOLERANCE)
    kept = UntracedLayer if family == "llama3" else UntracedSlidingLayer
    assert [type(layer) for layer in cache.layers] == [kept, HybridCacheLayer]
    assert cache.is_compileable


@torch.no_grad()
def test_a_static_cache_can_start_again(make_linear, kit):
    model, input_ids = make_linear(exact=[0]), kit.tokens(1, 9)
    cache = static_cache(model, 8)
    first = model(input_ids[:, :8], past_key_values=cache).logits
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model(input_ids[:, :8], past_key_values=cache).logits, first)


@torch.no_grad()
def test_a_static_cache_of_another_model_is_refused(make_linear, llama, kit):
    model, input_ids = make_linear(), kit.tokens(1, 9)
    cache = static_cache(model, 12)
    llama(input_ids[:, :4], past_key_values=cache)
    for run in (model, model.model):
        with pytest.raises(ValueError, match="4 tokens of another model"):
            run(input_ids[:, 4:], past_key_values=cache)
    # nor one that was filled in softmax mode, where it works too
    cache = static_cache(model, 12)
    softmax = {"past_key_values": cache, "attention_call": SOFTMAX}
    pieces = [model(part, **softmax).logits for part in input_ids.split([5, 1, 3], dim=1)]
    whole = model(input_ids, use_cache=False, attention_call=SOFTMAX).logits
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **TOLERANCE)
    with pytest.raises(ValueError, match="start with an empty cache"):
        model(input_ids[:, :1], past_key_values=cache)


@torch.no_grad()
def test_rows_can_be_reordered_repeated_and_selected(filled):
    model, input_ids, cache = filled
    step = input_ids[:, 10:11]
    expected = model(step, past_key_values=copy.deepcopy(cache)).logits

    swapped = copy.deepcopy(cache)
    swapped.reorder_cache(torch.tensor([1, 0]))
    logits = model(step.flip(0), past_key_values=swapped).logits
    torch.testing.assert_close(logits, expected.flip(0), **TOLERANCE)

    repeated = copy.deepcopy(cache)
    repeated.batch_repeat_interleave(3)
    logits = model(step.repeat_interleave(3, 0), past_key_values=repeated).logits
    torch.testing.assert_close(logits, expected.repeat_interleave(3, 0), **TOLERANCE)

    for indices in (torch.tensor([1]), torch.tensor([False, True])):
        selected = copy.deepcopy(cache)
        selected.batch_select_indices(indices)
        logits = model(step[1:], past_key_values=selected).logits
        torch.testing.assert_close(logits, expected[1:], **TOLERANCE)

    cache.reorder_cache(torch.tensor([0, 0]))
    model(step, past_key_values=cache)  # different tokens, written in place: the rows share no memory
    assert not torch.equal(cache.layers[0].state.k[0], cache.layers[0].state.k[1])


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
        assert all(torch.equal(state.tensors()[name], tensor) for name, tensor in tensors.items())
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
    assert all(type(layer) is DynamicLayer for layer in cache.layers)


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


@torch.no_grad()
def test_the_state_matters(make_linear, kit, monkeypatch):
    """The wrong variant of the cache tests: a state that is dropped changes the logits."""
    model, input_ids = make_linear(), kit.tokens(2, 16)
    whole = model(input_ids, use_cache=False).logits
    monkeypatch.setattr(HybridCacheLayer, "state", property(lambda self: None, lambda self, value: None), raising=False)
    pieces, _ = kit.in_pieces(model, input_ids, [8, 8])
    assert (pieces[:, 8:] - whole[:, 8:]).abs().max() > 1e-2
