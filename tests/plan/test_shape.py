"""What the plan counts is what conversion and PEFT really make."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lolcats.config import AdjustSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.modeling.cache_size import cache_bytes
from lolcats.plan.shape import find_config, shape_of
from lolcats.training.lora import add_lora

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
FAMILIES = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 24},
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": None},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt_neox": {"rotary_pct": 0.5},
}


def config_of(family: str, **changes):
    return AutoConfig.for_model(family.partition("-")[0], **(COMMON | FAMILIES[family] | changes))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "attention",
    [
        AttentionConfig(),
        AttentionConfig(share_state="query_head", feature_map="t2r", exact=[1]),
        AttentionConfig(exact=["0.1", "2"]),
    ],
    ids=["default", "t2r", "heads"],
)
def test_parameters_are_those_of_the_real_model(family, attention):
    if family == "gemma2" and attention.exact:
        attention = replace(attention, sliding_layers="linearize")
    adjust = AdjustSection(lora_rank=3)
    shape = shape_of(config_of(family), attention, adjust)
    base = AutoModelForCausalLM.from_config(config_of(family))
    assert shape.parameters == sum(parameter.numel() for parameter in base.parameters())
    model = convert(base, attention)
    layers = dict(model.linear_layers())
    assert shape.linear_layers == tuple(sorted(layers))
    assert shape.feature_parameters == sum(p.numel() for layer in layers.values() for p in layer.parameters())
    assert (shape.head == 0) == (family in ("llama-tied", "gemma2"))
    wrapped = add_lora(model, adjust)
    trainable = sum(p.numel() for name, p in wrapped.named_parameters() if "lora_" in name)
    assert shape.lora_parameters(3) == trainable


def test_grouped_heads_and_mlp_columns():
    (layer, *_) = shape_of(config_of("phi3"), AttentionConfig(), AdjustSection()).layers
    assert (layer.heads, layer.kv_heads, layer.state_heads, layer.head_dim) == (4, 2, 2, 8)
    assert (layer.mlp_inputs, layer.mlp_outputs) == (96, 48)  # gate and up in one projection
    (layer, *_) = shape_of(config_of("gpt_neox"), AttentionConfig(share_state="query_head"), AdjustSection()).layers
    assert (layer.state_heads, layer.mlp_inputs, layer.mlp_outputs) == (4, 48, 48)


def test_layers_without_attention_are_refused():
    config = AutoConfig.for_model("lfm2", **COMMON, layer_types=["conv", "full_attention", "conv"])
    with pytest.raises(UserError, match=r"lfm2 has layers without attention \(0, 2\).*short run"):
        shape_of(config, AttentionConfig(), AdjustSection())


@pytest.mark.parametrize(("experts", "message"), [(4, "num_local_experts=4"), (1, "matrix outside a linear layer")])
def test_mixtures_of_experts_are_refused(experts, message):
    config = AutoConfig.for_model("mixtral", **COMMON, num_local_experts=experts, num_experts_per_tok=1)
    with pytest.raises(UserError, match=message):
        shape_of(config, AttentionConfig(), AdjustSection())


def test_named_shapes_and_folders(model_dir, known_shape, tmp_path):
    large = known_shape("llama3-405b")
    assert 405e9 < large.parameters < 407e9
    assert find_config(str(model_dir)).num_hidden_layers == 2
    with pytest.raises(UserError, match="name a shape: llama3-8b"):
        find_config(str(tmp_path / "nothing"))


def test_budgets_and_caches():
    """A budget leaves stage 1 as it is, takes the dearest heads, and the cache is that of the real model."""
    attention = AttentionConfig(window_size=4, sliding_layers="linearize", exact=["34%"])
    config = config_of("gemma2", head_dim=16, query_pre_attn_scalar=16)  # 3 layers of 2 KV heads, one without a window
    shape = shape_of(config, attention, AdjustSection())
    assert (shape.exact_heads, shape.chosen) == (0, {1: [0, 1]})
    after = shape.after_gates
    assert (after.exact_heads, after.linear_layers) == (2, (0, 2))
    converted = convert(AutoModelForCausalLM.from_config(config), replace(attention, exact=[1]))
    assert after.cache_bytes(1000) == cache_bytes(converted.config, 1000, torch.bfloat16)
    growth = {tokens: after.cache_bytes(tokens) - shape.cache_bytes(tokens) for tokens in (1000, 2000)}
    assert growth[2000] - growth[1000] == 1000 * 2 * 2 * 16 * 2


def test_a_window_in_bytes_bounds_the_cache_but_not_softmax():
    attention = AttentionConfig(window_size=4, exact=["50%"])
    config = config_of("llama")
    free = shape_of(config, attention, AdjustSection())
    shape = shape_of(config, replace(attention, exact_window="16KiB"), AdjustSection())
    assert free.after_gates.cache_bytes(10**6) > 10**6
    assert 15 * 1024 < shape.after_gates.cache_bytes(10**6) <= 16 * 1024
    assert shape.softmax.cache_bytes(1000) == free.softmax.cache_bytes(1000)
