"""Exact heads and windows in 8 bits: the same outputs however a text is read, and the bytes promised."""

import pytest
import torch
from transformers import DynamicCache

from lolcats.config import AdjustSection
from lolcats.modeling.attention import SOFTMAX
from lolcats.ops.eight_bits import FACTOR_BYTES, pack, unpack
from lolcats.training.lora import add_lora

ATTENTION = {"window_size": 3, "sinks": 2, "exact": ["0.1", "1"], "cache_bits": 8}
WINDOW = 5


@pytest.fixture(params=["llama3", "gemma3", "gpt-oss", "gemma4-shared-keys"])
def model(request, kit):
    """In float64, where no sum in another order makes another 8-bit number."""
    return kit.linearized(kit.build(request.param), **ATTENTION, sliding_layers="linearize").double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_packing(dtype):
    x = torch.randn(3, 2, 7, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1, 0, 3] = 0.0
    x[2, 1] *= 1e4
    packed = pack(x.transpose(1, 2))
    assert (packed.dtype, packed.shape) == (torch.int8, (3, 7, 2, 20 + FACTOR_BYTES))
    assert torch.equal(unpack(torch.zeros_like(packed), dtype), torch.zeros_like(x.transpose(1, 2)))
    assert all(torch.equal(unpack(pack(y), dtype), y) for y in (x[:1, :, :0], x[1:2, :1, 3:4, :18]))  # none, one token
    error = unpack(packed, torch.float64).transpose(1, 2) - x.double()
    assert (error.abs() <= 1.001 / 254 * x.double().abs().amax(-1, keepdim=True)).all()
    assert error.abs().max() > 0.0


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_cache_keeps_the_form_in_which_it_began(kit, window, gradients):
    """Filled without gradients and continued with them, or the reverse."""
    model, tokens = kit.linearized(kit.build("llama3"), **ATTENTION, exact_window=window).double(), kit.tokens(2, 20)
    cache = DynamicCache(config=model.config.get_text_config())
    with torch.set_grad_enabled(gradients):
        model(tokens[:, :12], past_key_values=cache)
        expected = model(tokens, use_cache=False).logits[:, 12:]
    with torch.set_grad_enabled(not gradients):
        pieces = [model(part, past_key_values=cache).logits for part in tokens[:, 12:].split([1, 6, 1], 1)]
        other = model(tokens, use_cache=False).logits[:, 12:]
    torch.testing.assert_close(torch.cat(pieces, 1), expected)
    assert (other - expected).abs().max() > 1e-6


@torch.no_grad()
def test_eight_bits_are_near_and_are_used(model, kit):
    tokens = kit.tokens(2, 30)
    found, teacher = model(tokens).logits, model(tokens, attention_call=SOFTMAX).logits
    model.set_attention(cache_bits=None)
    full = model(tokens).logits
    assert torch.equal(model(tokens, attention_call=SOFTMAX).logits, teacher)
    size = full.std()
    assert 1e-5 * size < (found - full).square().mean().sqrt() < 0.1 * size  # few tokens go to other experts


@pytest.mark.parametrize("targets", ["qkvo", "qv", "v", "q"])
def test_training_sees_full_precision(kit, targets):
    model, tokens = kit.linearized(kit.build("llama3"), **ATTENTION | {"exact": ["0.1"]}), kit.tokens(2, 30)
    adapted = add_lora(model, AdjustSection(lora_targets=list(targets), lora_rank=2))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)

    def gradients():
        adapted.zero_grad()
        adapted(tokens, labels=tokens).loss.backward()
        return {name: x.grad.clone() for name, x in adapted.named_parameters() if x.requires_grad}

    packed = gradients()
    model.set_attention(cache_bits=None)
    full = gradients()
    assert all(gradient.abs().max() > 0 for gradient in full.values())
    torch.testing.assert_close(packed, full)
