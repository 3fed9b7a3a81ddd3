"""Keys' channels of one range: the same function, and less lost in 8 bits."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma3TextConfig, LlamaConfig, Olmo2Config, Qwen3Config

from lolcats.config import AdjustSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.modeling.attention import SOFTMAX
from lolcats.modeling.balance import balance_keys
from lolcats.training.lora import add_lora

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
IDS = torch.randint(97, (2, 60), generator=torch.Generator().manual_seed(0))


def model_with_outliers(heads=2, **attention):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"num_key_value_heads": heads}, attention_bias=True))
    for layer in base.model.layers:  # as Qwen2 has them
        layer.self_attn.k_proj.bias.data[[3, 11, 5 - 16]] = torch.tensor([60.0, -25.0, 90.0])
    model = convert(base, AttentionConfig(window_size=8, exact=("0.1",)[: heads - 1], **attention)).eval()
    for _, layer in model.linear_layers():
        for weight in (layer.q_weight, layer.k_weight):
            weight.data += 0.1 * torch.randn_like(weight)
    return model


def logits(model, **call):
    with torch.no_grad():
        return model(IDS, use_cache=False, **call).logits


@pytest.mark.parametrize(("share", "heads", "most"), [("kv_head", 2, 0.6), ("query_head", 2, 0.6), ("kv_head", 1, 0.9)])
def test_the_function_stays_and_eight_bits_lose_less(share, heads, most):
    model = model_with_outliers(heads, share_state=share)
    softmax, hybrid = logits(model, attention_call=SOFTMAX), logits(model)
    packed = copy.deepcopy(model)
    packed.set_attention(cache_bits=8)
    lost = (logits(packed) - hybrid).norm()
    assert balance_keys(model) == 2
    assert torch.equal(logits(model, attention_call=SOFTMAX), softmax)
    torch.testing.assert_close(logits(model), hybrid, rtol=1e-5, atol=1e-5)
    model.set_attention(cache_bits=8)
    assert (logits(model) - hybrid).norm() < most * lost


@pytest.mark.parametrize("config", [Qwen3Config, Olmo2Config, Gemma3TextConfig, CohereConfig])
def test_keys_behind_a_norm(config):
    """Of all channels, or of each head's; Gemma's norms multiply by one plus their weight, Cohere's are [heads, D]."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config(**SIZES, pad_token_id=0, use_qk_norm=True)).eval()
    for layer in base.model.layers:
        layer.self_attn.k_norm.weight.data[..., [3, 11]] = torch.tensor([40.0, 9.0])
    model = convert(base, AttentionConfig(window_size=8, exact=("0.1",), sliding_layers="linearize")).eval()
    before, hybrid = copy.deepcopy(model.state_dict()), logits(model)
    assert balance_keys(model) == (2 if config in (Qwen3Config, Olmo2Config) else 0)
    torch.testing.assert_close(logits(model), hybrid, rtol=1e-5, atol=1e-5)
    same = all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert same == (config in (Gemma3TextConfig, CohereConfig))


def test_adapters_are_scaled_with_their_layers():
    model = model_with_outliers()
    adapted = add_lora(model, AdjustSection())
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            weight.data.normal_()
    before = logits(model)
    assert balance_keys(model) == 2
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
