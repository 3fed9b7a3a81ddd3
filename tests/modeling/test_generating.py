"""Kernels in `generate`: compared once, in place during each call alone, and never beside changes of somebody else."""

from __future__ import annotations

import gc
import importlib.util
import threading
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import GenerationConfig

from lolcats.modeling import generating, residual_norms

SETTINGS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture
def calls(monkeypatch, together):
    """What happens, where a CPU decides as a GPU does: sums with norms, and comparisons of kernels."""

    @contextmanager
    def kernels(model, report, *, move_weights):
        assert not move_weights
        together.append("compared")
        with residual_norms.residual_norms(model):
            yield

    monkeypatch.setattr(generating, "_on_gpu", lambda model: True)
    monkeypatch.setattr(generating, "generation_kernels", kernels)
    return together


def attributes(model):
    return {name: dict(vars(module)) for name, module in model.named_modules() if "linear_attention" not in name}


def test_compared_once_and_in_place_during_calls_alone(model, calls, kit):
    input_ids = kit.tokens(1, 7)
    with torch.no_grad():
        expected = input_ids
        for _ in range(6):
            expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    before = attributes(model)
    for compared in (1, 0):
        calls.clear()
        assert torch.equal(model.generate(input_ids, **SETTINGS), expected)
        assert calls.count("compared") == compared
        assert len(calls) - compared == 6 * 2 * len(model.get_decoder().layers)  # two norms a layer and token
        assert attributes(model) == before
    calls.clear()
    model(input_ids)
    assert not calls


@pytest.mark.parametrize(
    ("change", "again"),
    [
        (lambda layer: setattr(layer, "post_attention_layernorm", nn.LayerNorm(len(layer.mlp.gate_proj.weight.T))), 1),
        (lambda layer: vars(layer).update(forward=type(layer).forward.__get__(layer)), 1),
        (lambda layer: inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), layer), 0),
    ],
    ids=["another norm", "another forward", "adapters in a module that the kernels leave alone"],
)
def test_changed_modules_are_looked_at_again(model, calls, kit, change, again):
    model.generate(kit.tokens(1, 7), **SETTINGS)
    change(model.get_decoder().layers[0])
    before = attributes(model)
    for compared in (again, 0):
        calls.clear()
        model.generate(kit.tokens(1, 7), **SETTINGS)
        assert calls.count("compared") == compared
        assert attributes(model) == before


def test_left_out(model, calls, kit, monkeypatch):
    """While the model trains, where `generate` compiles, where hooks move weights, and on a CPU."""
    input_ids = kit.tokens(1, 7)
    model.train().generate(input_ids, **SETTINGS)
    model.eval().generate(input_ids, cache_implementation="static", **SETTINGS)
    model.generate(input_ids, GenerationConfig(cache_implementation="static"), **SETTINGS)
    model.get_decoder().layers[1]._hf_hook = object()
    model.generate(input_ids, **SETTINGS)
    monkeypatch.undo()
    model.generate(input_ids, **SETTINGS)
    assert not calls


def test_hooks_see_what_they_always_see(model, calls, kit):
    """Neither passed by nor called by the comparison; transformers' own, which stay, change nothing."""
    input_ids, seen = kit.tokens(1, 7), []
    layer = model.get_decoder().layers[1]
    assert model(input_ids, output_hidden_states=True).hidden_states
    assert layer._forward_hooks

    def generate(module):
        hook = module.register_forward_hook(lambda *_: seen.append(module))
        model.generate(input_ids, **SETTINGS)
        hook.remove()
        assert len(seen) == 6
        seen.clear()

    generate(layer)
    assert not calls
    model.generate(input_ids, **SETTINGS)
    assert calls
    calls.clear()
    generate(layer)
    assert calls
    calls.clear()
    generate(layer.post_attention_layernorm)
    assert not calls


def test_models_can_go(calls, kit):
    model = kit.linearized(kit.build("qwen2"), window_size=3)
    model.generate(kit.tokens(1, 7), **SETTINGS)
    assert model in generating._known
    gone = weakref.ref(model)
    calls.clear()
    del model
    gc.collect()
    assert gone() is None


def test_calls_overlap(model, calls, kit):
    """Of two threads: the one that ends first leaves the other's kernels in place."""
    before = attributes(model)
    inner, outer = threading.Event(), threading.Event()

    def wait():
        with generating.kernels_for_generate(model):
            inner.set()
            outer.wait(60)
            assert attributes(model) != before

    thread = threading.Thread(target=wait)
    thread.start()
    assert inner.wait(60)
    with pytest.raises(RuntimeError, match="inside"), generating.kernels_for_generate(model):
        raise RuntimeError("inside")
    assert attributes(model) != before
    outer.set()
    thread.join()
    assert attributes(model) == before
    assert calls == ["compared"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
def test_the_same_tokens_on_a_gpu(model, kit, monkeypatch):
    model, input_ids, norms, plain = model.cuda(), kit.tokens(2, 40).cuda(), [], residual_norms.add_and_norm
    monkeypatch.setattr(residual_norms, "add_and_norm", lambda *given: norms.append(given[0]) or plain(*given))
    with_kernels = model.generate(input_ids, **SETTINGS)
    assert norms
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "kernels_for_generate", nullcontext)
        assert torch.equal(model.generate(input_ids, **SETTINGS), with_kernels)
    count = len(norms)
    assert torch.equal(model.generate(input_ids, cache_implementation="static", **SETTINGS), with_kernels)
    assert len(norms) == count
