"""A linear_length_cap given to a model that was made without one."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.evaluation.load import load_model
from lolcats.generation.snapshot import model_fingerprint


@torch.no_grad()
def test_it_changes_only_what_comes_after_it(make_linear, kit):
    model, tokens = make_linear(window="terraced", window_size=4), kit.tokens(2, 40)
    without, before = model(tokens).logits, model_fingerprint(model)
    model.set_attention(linear_length_cap=20)
    assert model_fingerprint(model) != before
    limited = model(tokens).logits
    torch.testing.assert_close(limited[:, :20], without[:, :20])
    assert (limited[:, 20:] - without[:, 20:]).abs().amax((0, 2)).min() > 1e-5
    model.set_attention(linear_length_cap=0)
    assert torch.equal(model(tokens).logits, without)


@pytest.mark.parametrize("padded", [False, True])
def test_generation_with_cache_equals_without(make_linear, kit, padded):
    model, tokens = make_linear(window="sliding", window_size=4), kit.tokens(3, 21)
    model.set_attention(linear_length_cap=12)
    mask = kit.padding([21, 9, 14], 21) if padded else torch.ones_like(tokens)
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(model.generate(tokens, **options), model.generate(tokens, use_cache=False, **options))


@torch.no_grad()
def test_it_is_saved(make_linear, kit, tmp_path):
    model, tokens = make_linear(window="terraced", window_size=4), kit.tokens(1, 30)
    without = model(tokens).logits
    model.set_attention(linear_length_cap=8)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, model(tokens).logits)
    assert not torch.equal(model(tokens).logits, without)


def test_a_model_without_linear_part_is_refused(make_linear):
    model = make_linear(window="sliding", window_size=4, feature_map=None)
    with pytest.raises(ValueError, match="needs both"):
        model.set_attention(linear_length_cap=3)
    assert model.config.attention.linear_length_cap == 0


def test_conversion_and_loading_give_it(model_dir, tmp_path):
    base, tokenizer = load_model(model_dir)
    convert(base, AttentionConfig(window_size=4, linear_length_cap=9)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for given, expected in ((None, 9), (50, 50), (0, 0)):
        model, _ = load_model(tmp_path, linear_length_cap=given, sparse_cache=5)
        assert {
            (module.config.linear_length_cap, module.config.sparse_cache) for _, module in model.linear_layers()
        } == {(expected, 5)}
    with pytest.raises(UserError, match="--linear-length-cap -1: linear_length_cap=-1"):
        load_model(tmp_path, linear_length_cap=-1)
