"""A sparse cache given to a model that was made without one."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from lolcats.errors import UserError
from lolcats.evaluation.load import load_model, set_attention
from lolcats.generation.engine import Engine
from lolcats.generation.sampling import SamplingParams
from lolcats.modeling import layer as layer_module
from lolcats.modeling.call import SOFTMAX


@pytest.fixture(params=["recall", "leverage"])
def model(request, make_linear):
    made = make_linear(window="terraced", window_size=4)
    made.set_attention(sparse_cache=6, cache_by=request.param)
    return made


@torch.no_grad()
def test_it_changes_only_what_left_the_window(make_linear, kit):
    model, tokens = make_linear(window="terraced", window_size=4), kit.tokens(2, 40)
    without = model(tokens).logits
    model.set_attention(sparse_cache=6)
    with_cache = model(tokens).logits
    torch.testing.assert_close(with_cache[:, :8], without[:, :8])
    assert (with_cache[:, 9:] - without[:, 9:]).abs().max() > 1e-3


@torch.no_grad()
def test_a_cache_for_all_tokens_is_softmax_attention(make_linear, kit):
    model, tokens = make_linear(window="terraced", window_size=4), kit.tokens(2, 40)
    model.set_attention(sparse_cache=40)
    softmax = model(tokens, attention_call=SOFTMAX).logits
    torch.testing.assert_close(model(tokens).logits, softmax, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_generation_with_cache_equals_without(model, kit, padded):
    tokens = kit.tokens(3, 21)
    mask = kit.padding([21, 9, 14], 21) if padded else torch.ones_like(tokens)
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(model.generate(tokens, **options), model.generate(tokens, use_cache=False, **options))


@torch.no_grad()
def test_pieces_equal_the_whole_and_the_state_does_not_grow(model, kit):
    # No two alike in a row: equal values tie for the slots, and rounding would decide.
    tokens = torch.rand(2, kit.vocabulary, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :45]
    cache, sizes, logits = DynamicCache(config=model.config.get_text_config()), set(), []
    for piece in tokens.split([7, 1, 1, 20, 16], dim=1):
        logits.append(model(piece, past_key_values=cache, use_cache=True).logits)
        sizes.add(sum(layer.state.nbytes for layer in cache.layers))
    torch.testing.assert_close(torch.cat(logits, 1), model(tokens).logits, rtol=2e-4, atol=2e-4)
    assert len(sizes) == 1


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_decoding_looks_for_blocks_where_they_may_leave(model, kit, monkeypatch, padded):
    """Without padding, all sequences are as long as the cache says; two blocks of 4 are in the window."""
    asked = []

    def attend(*arguments, block_evicted, **options):
        asked.append(block_evicted)
        return original(*arguments, block_evicted=block_evicted, **options)

    original = layer_module.hybrid_attention
    monkeypatch.setattr(layer_module, "hybrid_attention", attend)
    tokens = kit.tokens(2, 20)
    mask = kit.padding([20, 19], 20)[:, :7] if padded else None
    cache = DynamicCache(config=model.config.get_text_config())
    model(tokens[:, :7], attention_mask=mask, past_key_values=cache, use_cache=True)
    asked.clear()
    for t in range(7, 20):
        model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True)
    layers = len(cache.layers)
    assert asked[::layers] == [padded or t in (8, 12, 16) for t in range(7, 20)]
    cache.reset()
    assert not any(layer.padded for layer in cache.layers)


def test_the_engine_gives_the_same_tokens(model, kit, model_dir):
    prompts = [kit.tokens(1, length)[0].tolist() for length in (3, 18, 30)]
    engine = Engine(model, AutoTokenizer.from_pretrained(model_dir), max_slots=2)
    handles = [engine.submit(prompt, SamplingParams(max_new_tokens=12, ignore_eos=True)) for prompt in prompts]
    answers = [handle.result().token_ids for handle in handles]
    engine.shutdown()
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert answer == expected.tolist()


@torch.no_grad()
def test_it_is_saved_and_can_be_given_on_loading(model, kit, tmp_path):
    tokens = kit.tokens(1, 30)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, model(tokens).logits)


def test_a_model_without_terraced_window_is_refused(make_linear):
    model = make_linear(window="sliding", window_size=4)
    with pytest.raises(ValueError, match="needs a terraced window"):
        model.set_attention(sparse_cache=3)
    assert model.config.attention.sparse_cache == 0


def test_loading_gives_it(model_dir, finished_folder):
    model, _ = load_model(finished_folder, sparse_cache=5)
    assert {module.config.sparse_cache for _, module in model.linear_layers()} == {5}
    with pytest.raises(UserError, match="--sparse-cache -1"):
        load_model(finished_folder, sparse_cache=-1)


def test_loading_says_how_it_chooses(finished_folder):
    model, _ = load_model(finished_folder, sparse_cache=5, cache_by="leverage")
    assert {(module.config.sparse_cache, module.config.cache_by) for _, module in model.linear_layers()} == {
        (5, "leverage")
    }
    set_attention(model, sparse_cache=7)
    assert (model.config.attention.sparse_cache, model.config.attention.cache_by) == (7, "leverage")
    set_attention(model, cache_by="recall")
    assert (model.config.attention.sparse_cache, model.config.attention.cache_by) == (7, "recall")
    with pytest.raises(UserError, match="--sparse-cache 5 --cache-by age: cache_by='age': expected 'recall' or 'lev"):
        set_attention(model, sparse_cache=5, cache_by="age")
    assert (model.config.attention.sparse_cache, model.config.attention.cache_by) == (7, "recall")
    with pytest.raises(UserError, match="--cache-by leverage: the model has no sparse cache; give its size"):
        load_model(finished_folder, cache_by="leverage")


@torch.no_grad()
def test_the_choices_differ(make_linear, kit):
    model, tokens = make_linear(window="terraced", window_size=4), kit.tokens(2, 40)
    model.set_attention(sparse_cache=6, cache_by="recall")
    recall = model(tokens).logits
    model.set_attention(sparse_cache=6, cache_by="leverage")
    assert (model(tokens).logits - recall).abs().max() > 1e-3


@pytest.fixture
def finished_folder(model_dir, tmp_path):
    """A converted model with its tokenizer."""
    from lolcats.config import AttentionConfig
    from lolcats.conversion import convert

    base, tokenizer = load_model(model_dir)
    convert(base, AttentionConfig(window_size=4)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path
