"""Sums with norms in one launch: the same results, each norm made once, and the model as before."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from lolcats.modeling import residual_norms
from lolcats.modeling.fused import liger_kernels


def logits(model, input_ids):
    with torch.no_grad():
        return model(input_ids, use_cache=False).logits


def attributes(model):
    return {name: dict(vars(module)) for name, module in model.named_modules()}


def test_all_but_the_first_norm_come_with_a_sum(model, together, kit):
    decoder, input_ids = model.get_decoder(), kit.tokens(2, 9)
    expected, before = logits(model, input_ids), attributes(model)
    with residual_norms.residual_norms(model):
        assert torch.equal(logits(model, input_ids), expected)
    first, *others = decoder.layers
    order = [first.post_attention_layernorm]
    for layer in others:
        order += [layer.input_layernorm, layer.post_attention_layernorm]
    assert together == [*order, decoder.norm]
    assert attributes(model) == before


def test_a_norm_is_handed_out_for_its_own_sum_alone(model, together, kit):
    """Something changes the hidden states between two layers."""
    input_ids = kit.tokens(2, 9)
    plain = logits(model, input_ids)
    hook = model.get_decoder().layers[1].register_forward_pre_hook(lambda layer, args: (args[0] * 1.5, *args[1:]))
    expected = logits(model, input_ids)
    with residual_norms.residual_norms(model):
        assert torch.equal(logits(model, input_ids), expected)
        hook.remove()
        assert torch.equal(logits(model, input_ids), plain)
    assert not torch.equal(expected, plain)
    assert together


def test_gradients_take_the_models_own_way(model, together, kit):
    with residual_norms.residual_norms(model):
        model(kit.tokens(2, 9), use_cache=False).logits.sum().backward()
    assert not together
    assert model.get_decoder().layers[0].input_layernorm.weight.grad is not None


@pytest.mark.parametrize("family", ["gemma2", "olmo2", "granite", "phi3"])
def test_other_layers_are_left_alone(kit, together, family):
    model = kit.linearized(kit.build(family), window_size=3)
    before = attributes(model)
    with residual_norms.residual_norms(model):
        assert attributes(model) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_stay_the_same_on_a_gpu(model, kit, monkeypatch, dtype):
    model, norms, plain = model.to("cuda", dtype), [], residual_norms.add_and_norm
    monkeypatch.setattr(residual_norms, "add_and_norm", lambda *given: norms.append(given[0]) or plain(*given))
    input_ids = kit.tokens(2, 9).cuda()
    with liger_kernels(model):
        expected = logits(model, input_ids)
        with residual_norms.residual_norms(model):
            torch.testing.assert_close(logits(model, input_ids), expected)
    assert len(norms) == 2 * len(model.get_decoder().layers)
