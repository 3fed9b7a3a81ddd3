"""Kernels inside one model: nothing else changes, and afterwards nothing has."""

import importlib.util
import sys
from contextlib import suppress

import pytest
import torch
from family_models import COMMON
from transformers import AutoConfig, AutoModelForCausalLM

from lolcats.config import AdjustSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.modeling.attention import SOFTMAX
from lolcats.modeling.fused import FAMILIES, fused_kernels, liger_kernels, lora_in_model_type
from lolcats.training.lora import add_lora

needs_liger = pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")


def make_model(family="llama", dtype=torch.float32, device="cpu"):
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "initializer_range": 0.02}
    config = AutoConfig.for_model(family, **(COMMON | shape))
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config).to(dtype).to(device)
    return convert(base, AttentionConfig(window_size=4, feature_dim=8)).eval()


@torch.no_grad()
def hidden_states(model):
    tokens_BT = torch.arange(1, 64, device=model.device)[None]
    return model.get_decoder()(input_ids=tokens_BT, use_cache=False, attention_call=SOFTMAX)[0]


def attributes(model):
    return {
        name: {key: value for key, value in vars(module).items() if key != "training"}
        for name, module in model.named_modules()
    }


@needs_liger
@pytest.mark.parametrize("family", FAMILIES)
def test_liger_changes_this_model_only(family):
    """And restores it, whatever happens inside."""
    model = make_model(family)
    source = vars(sys.modules[type(model.model).__module__])
    names, before = dict(source), attributes(model)
    outputs, weights = hidden_states(model), list(model.state_dict())
    with suppress(ZeroDivisionError), liger_kernels(model) as changed:
        assert source.keys() == names.keys()
        assert all(source[name] is value for name, value in names.items())
        assert list(model.state_dict()) == weights
        for layer in ("model.layers.0", "model.layers.1"):
            parts = {name.removeprefix(layer + ".") for name in changed if name.startswith(layer + ".")}
            assert {"mlp", "self_attn", "post_attention_layernorm"} <= parts
        assert "model.norm" in changed
        rotary = model.model.model.layers[0].self_attn.forward.__globals__["apply_rotary_pos_emb"]
        assert rotary.__module__.startswith("liger_kernel")
        raise ZeroDivisionError
    after = attributes(model)
    assert all(after[name] == values for name, values in before.items())
    assert torch.equal(hidden_states(model), outputs)


@needs_liger
def test_lora_finds_the_projections_of_a_changed_model():
    model = make_model()
    with liger_kernels(model):
        wrapped = add_lora(model, AdjustSection(lora_rank=2))
    assert sum("lora_A" in name for name, _ in wrapped.named_parameters()) == 2 * 4


def adapted_model(dtype):
    model = make_model(dtype=dtype)
    model.requires_grad_(False)
    wrapped = add_lora(model, AdjustSection(lora_rank=4))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model, wrapped


def loss_and_gradients(model, wrapped):
    model.zero_grad()
    hidden = model.get_decoder()(input_ids=torch.arange(12)[None], use_cache=False)[0]
    direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    (hidden.float() * direction).mean().backward()
    gradients = {name: p.grad.clone() for name, p in wrapped.named_parameters() if p.requires_grad}
    return hidden.detach().float(), gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lora_in_the_models_type_is_lora(dtype):
    """And stays PEFT's own in float32."""
    model, wrapped = adapted_model(dtype)
    half = dtype == torch.bfloat16
    expected, wanted = loss_and_gradients(model, wrapped)
    with wrapped.disable_adapter():
        plain = model.get_decoder()(input_ids=torch.arange(12)[None], use_cache=False)[0].float()
    calls = []
    with lora_in_model_type(model):
        hook = (
            wrapped.base_model.model.model.model.layers[0]
            .self_attn.q_proj.lora_A["default"]
            .register_forward_hook(lambda *arguments: calls.append(1))
        )
        hidden, gradients = loss_and_gradients(model, wrapped)
        with wrapped.disable_adapter():
            off = model.get_decoder()(input_ids=torch.arange(12)[None], use_cache=False)[0].float()
        hook.remove()
    assert bool(calls) != half  # PEFT's own way calls the adapter's modules

    def difference(a, b):
        return float((a - b).norm() / b.norm())

    assert difference(plain, expected) > 0.1  # the adapters matter
    assert difference(hidden, expected) <= 2e-2 * half  # bfloat16, two layers
    assert torch.equal(off, plain)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        assert difference(gradient, wanted[name]) <= 5e-2 * half, name
    again, _ = loss_and_gradients(model, wrapped)
    assert torch.equal(again, expected)


@needs_liger
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_results_stay_the_same_on_a_gpu(family, dtype):
    model = make_model(family, dtype, "cuda")
    expected = hidden_states(model).double()
    with fused_kernels(model, "auto"):
        found = hidden_states(model).double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # two layers of bfloat16
    assert float((found - expected).norm() / expected.norm()) < tolerance
    assert torch.equal(hidden_states(model).double(), expected)
