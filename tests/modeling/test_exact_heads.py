"""Exact and linear heads in one layer: each head by itself defines what the layer computes, and every path agrees."""

import copy

import pytest
import torch
from family_models import TOLERANCE

from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.modeling.attention import SOFTMAX, AttentionCall
from lolcats.modeling.cache_size import cache_bytes, heads_in_budget

EXACT = ["0.1", "1.0"]


@pytest.fixture(scope="module")
def mixed(original):
    """Every family with one exact KV head in each layer, and the same model with linear heads alone."""
    settings = {"window": "terraced", "window_size": 3, "sliding_layers": "linearize"}
    linear = convert(copy.deepcopy(original), AttentionConfig(**settings))
    layers = {layer.index for layer in linear.config.layer_heads}
    exact = [head for head in EXACT if int(head[0]) in layers]
    some = convert(copy.deepcopy(original), AttentionConfig(**settings, exact=exact))
    torch.manual_seed(2)
    for (_, whole), (_, part) in zip(linear.linear_layers(), some.linear_layers(), strict=True):
        for (name, parameter), (_, taken) in zip(whole.named_parameters(), part.named_parameters(), strict=True):
            parameter.data += 0.3 * torch.randn_like(parameter)
            taken.data.copy_(part.heads.take_linear(parameter.data, 0))
            assert name
    return some, linear


@torch.no_grad()
def test_each_head_is_softmax_or_linear(mixed, kit):
    """The all-linear model, whose gates put softmax attention in the place of the exact heads' output."""
    some, linear = mixed
    heads = {index: module.heads for index, module in some.linear_layers()}
    gates = {
        i: torch.tensor([float(g in split.exact) for g in range(split.num_kv_heads)]) for i, split in heads.items()
    }
    input_ids, mask = kit.tokens(2, 20), kit.padding([20, 13], 20)
    given = {"attention_mask": mask, "use_cache": False}
    found = some(input_ids, **given).logits[mask.bool()]
    expected = linear(input_ids, **given, attention_call=AttentionCall(gates=gates)).logits[mask.bool()]
    torch.testing.assert_close(found, expected, **TOLERANCE)
    wrong = {index: gate.flip(0) for index, gate in gates.items()}
    other = linear(input_ids, **given, attention_call=AttentionCall(gates=wrong)).logits[mask.bool()]
    if len(gates[1]) > 1:
        assert (other - expected).abs().max() > 1e-2


@torch.no_grad()
def test_softmax_mode_is_the_base_model(mixed, original, kit):
    model, _ = mixed
    input_ids = kit.tokens(2, 12)
    torch.testing.assert_close(model(input_ids, attention_call=SOFTMAX).logits, original(input_ids).logits, **TOLERANCE)


def test_transfer_compares_the_linear_heads_alone(kit):
    model = kit.linearized(kit.build("llama3"), window_size=3, exact=EXACT)
    seen = {}

    def observe(layer):
        module, layer_idx, q, k, v, y_softmax, scoring, _ = layer
        seen[layer_idx] = module.output_mse(q, k, v, y_softmax, scoring)
        changed = y_softmax.clone()
        exact = module.heads.exact[0]
        changed[:, 2 * exact : 2 * exact + 2] += 100.0
        assert torch.equal(module.output_mse(q, k, v, changed, scoring), seen[layer_idx])
        assert not torch.equal(module.output_mse(q, k, v, changed.flip(1), scoring), seen[layer_idx])

    model(kit.tokens(2, 12), use_cache=False, attention_call=AttentionCall(mode="softmax", observe=observe))
    assert sorted(seen) == [0, 1]


def test_native_windows_cost_a_budget_little(kit):
    """Heads of a layer with a native window keep that alone; one that does not fit keeps no later one from it."""
    attention = {"window_size": 3, "sliding_layers": "linearize"}  # layer 0 sees 6 tokens, layer 1 all
    config = kit.linearized(kit.build("gemma3"), **attention).config
    base, head = cache_bytes(config, 4096, torch.float32), 2 * 16 * 4096 * 4
    budget = f"{(base + 1.5 * head) / 2**10:.1f}KiB@4096"
    ranked = [(1, 1), (1, 0), (0, 1), (0, 0)]
    assert heads_in_budget(config, budget, torch.float32, ranked) == {0: [0, 1], 1: [1]}
    kept = kit.linearized(kit.build("gemma3"), window_size=3).config  # layer 0 stays as it is
    assert heads_in_budget(kept, "50%", torch.float32) == {1: [0]}


def test_gates_need_whole_sequences(kit):
    model = kit.linearized(kit.build("llama3"), window_size=3)
    gates = {index: torch.ones(2) for index in (0, 1)}
    with pytest.raises(ValueError, match="use_cache=False"):
        model(kit.tokens(1, 5), use_cache=True, attention_call=AttentionCall(gates=gates))
    with pytest.raises(ValueError, match="mode='hybrid'"):
        AttentionCall(mode="softmax", gates=gates)
