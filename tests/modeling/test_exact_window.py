"""Models whose exact heads have a window, against the definition written out over positions."""

import pytest
import torch
from family_models import TOLERANCE
from softmax_written_out import written_out

from lolcats.errors import UserError
from lolcats.modeling import attention as attention_module
from lolcats.modeling import softmax
from lolcats.modeling.attention import SOFTMAX, AttentionCall
from lolcats.modeling.cache_size import cache_bytes, cache_sizes, window_in_budget

WINDOW, SINKS = 5, 2
EXACT = ["0.1", "1"]  # a layer of both kinds, and one of exact heads alone


@pytest.fixture(params=["llama3", "gemma3", "gpt-oss", "gemma4-shared-keys"])
def bounded(request, kit):
    """Layers of both kinds, in Gemma one with a native window."""
    attention = {"window_size": 3, "sinks": SINKS, "sliding_layers": "linearize"}
    attention |= {"exact": EXACT, "exact_window": WINDOW}
    return kit.linearized(kit.build(request.param), **attention)


@torch.no_grad()
def test_whole_sequences(bounded, kit, monkeypatch):
    """All layers, with padding; where a layer has a native window, that alone counts."""
    tokens, mask = kit.tokens(2, 30), kit.padding([30, 17], 30)
    found = bounded(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()]
    right, calls = softmax.softmax_attention, []

    def plain(q, k, v, scoring, visible, *, dropout):
        if not visible.sinks:
            return right(q, k, v, scoring, visible)
        window, sinks, borders, *_ = visible
        calls.append((window, sinks))
        given = scoring._asdict() | {"cu_seqlens": torch.tensor(borders)}
        return written_out(q, k, v, window=window, sinks=sinks, **given)

    monkeypatch.setattr(attention_module, "softmax_attention", plain)
    expected = bounded(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()]
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert set(calls) == {(WINDOW, SINKS)}
    monkeypatch.undo()
    bounded.set_attention(exact_window=WINDOW + 1)
    assert (bounded(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()] - expected).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[7, 13, 10], [3, 1, 1, 9, 1, 15], [6, 2, 22], [30]], ids=str)
def test_pieces_without_masks(bounded, kit, sizes, without_masks):
    tokens = kit.tokens(2, 30)
    pieces, _ = kit.in_pieces(bounded, tokens, sizes)
    if bounded.config.text_config.model_type == "gpt_oss":  # needs the scores
        assert not without_masks
    else:
        assert any(gap for gap, _ in without_masks) == (len(sizes) > 1)
    expected = bounded(tokens, use_cache=False, attention_mask=kit.padding([30, 29], 30)).logits[0]
    torch.testing.assert_close(pieces[0], expected, **TOLERANCE)


@torch.no_grad()
def test_a_wide_window_and_the_teacher_see_everything(kit):
    model, tokens = kit.linearized(kit.build("llama3"), window_size=3, sinks=SINKS, exact=EXACT), kit.tokens(2, 30)
    everything, teacher = model(tokens).logits, model(tokens, attention_call=SOFTMAX).logits
    model.set_attention(exact_window=28)
    torch.testing.assert_close(model(tokens).logits, everything, **TOLERANCE)
    model.set_attention(exact_window=WINDOW)
    assert (model(tokens).logits - everything).abs().max() > 1e-3
    assert torch.equal(model(tokens, attention_call=SOFTMAX).logits, teacher)


@torch.no_grad()
def test_gates_mix_what_exact_heads_would_see(kit):
    attention = {"window_size": 3, "sinks": SINKS, "exact_window": WINDOW}
    linear, tokens = kit.linearized(kit.build("llama3"), **attention), kit.tokens(2, 30)
    some = kit.linearized(kit.build("llama3"), **attention, exact=["0.1", "1.0"])
    for (_, whole), (_, part) in zip(linear.linear_layers(), some.linear_layers(), strict=True):
        for (_, parameter), (_, taken) in zip(whole.named_parameters(), part.named_parameters(), strict=True):
            taken.data.copy_(part.heads.take_linear(parameter.data, 0))
    gates = {0: torch.tensor([0.0, 1.0]), 1: torch.tensor([1.0, 0.0])}
    found = linear(tokens, use_cache=False, attention_call=AttentionCall(gates=gates)).logits
    torch.testing.assert_close(found, some(tokens, use_cache=False).logits, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("family", ["llama3", "gemma3"])
def test_a_window_in_bytes_is_the_largest_that_fits(kit, family, bits):
    """Gemma's first layer has a native window of 6 tokens."""
    attention = {"window_size": 3, "sinks": SINKS, "sliding_layers": "linearize", "cache_bits": bits}
    model = kit.linearized(kit.build(family), **attention, exact=EXACT, exact_window="20KiB")
    window = model.config.attention.exact_window
    assert isinstance(window, int)
    tokens = kit.tokens(1, window + SINKS + 9)

    def held():
        _, cache = kit.in_pieces(model, tokens, [tokens.shape[1] - 1, 1])
        total = 0
        for layer in cache.layers:
            exact = getattr(layer, "exact", layer)
            total += sum(x[exact.held(0, tokens.shape[1])].nbytes for x in exact.buffers.values())
            total += layer.state.nbytes if hasattr(layer, "state") else 0
        return total

    assert held() == cache_bytes(model.config, 10**6, torch.float32) <= 20 * 1024
    model.set_attention(exact_window=window + 1)
    assert held() > 20 * 1024
    model.set_attention(exact_window=None, cache_bits=8)
    assert held() == cache_bytes(model.config, tokens.shape[1], torch.float32)
    lengths = [6, 1000] if family == "gemma3" else [1000, 1000]
    softmax = sum(2 * 2 * layer.head_dim * 4 * n for layer, n in zip(model.config.layer_heads, lengths, strict=True))
    assert cache_sizes(model.config, 1000, torch.float32)[1] == softmax


def test_a_window_in_bytes_waits_for_the_choice_of_heads(kit):
    attention = {"window_size": 3, "exact_window": "20KiB"}
    model = kit.linearized(kit.build("llama3"), **attention, exact="50%")
    assert model.config.attention.exact_window == "20KiB"
    chosen = {0: [1], 1: [0]}
    foreseen = window_in_budget(model.config, model.config.attention, torch.float32, chosen)
    model.set_exact(chosen)
    assert model.config.attention.exact_window == foreseen
    assert kit.linearized(kit.build("llama3"), **attention).config.attention.exact_window is None  # nothing grows


def test_a_window_in_too_few_bytes_is_refused(kit):
    model = kit.linearized(kit.build("llama3"), window_size=3, exact=EXACT)
    with pytest.raises(UserError, match=r"keeps 0\.0012 MiB with the smallest window"):
        model.set_attention(exact_window="1KiB")
    assert model.config.attention.exact_window is None


def test_models_with_chunked_layers_are_refused(kit):
    with pytest.raises(ValueError, match="layers that attend within chunks"):
        kit.linearized(kit.build("llama4"), window_size=3, exact_window=9)
