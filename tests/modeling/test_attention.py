"""Masks, packed documents, observers and softmax attention by itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lolcats.modeling import attention, softmax
from lolcats.modeling.call import SOFTMAX, AttentionCall
from lolcats.modeling.softmax import softmax_attention

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}  # float32, the same sums in another order
LENGTHS = [7, 1, 12]
SOME = ["llama3", "phi1.5", "gemma2", "gpt-neox", "cohere", "afmoe", "gpt-oss"]
some_families = pytest.mark.parametrize("family", SOME, scope="module")


def packed(kit, model):
    """Three documents in one row: tokens [1, 20], their restarting positions, each document's own logits."""
    input_ids = kit.tokens(1, sum(LENGTHS))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    alone = torch.cat([model(part).logits for part in input_ids.split(LENGTHS, dim=1)], dim=1)
    return input_ids, positions, alone


@torch.no_grad()
@some_families
@pytest.mark.parametrize("mode", ["hybrid", "softmax"])
def test_packed_documents_equal_each_document_alone(kit, small_window, mode):
    call = AttentionCall(mode=mode)
    model = partial(small_window, attention_call=call)
    input_ids, positions, alone = packed(kit, model)
    torch.testing.assert_close(model(input_ids, position_ids=positions).logits, alone, **TOLERANCE)
    # the same through the decoder alone, as stage 1 calls it
    decoder = partial(small_window.get_decoder(), use_cache=False, attention_call=call)
    alone = torch.cat([decoder(input_ids=part)[0] for part in input_ids.split(LENGTHS, dim=1)], dim=1)
    torch.testing.assert_close(decoder(input_ids=input_ids, position_ids=positions)[0], alone, **TOLERANCE)


@torch.no_grad()
def test_borders_of_documents_matter(make_linear, kit):
    """The wrong variant: without their borders the documents see each other."""
    model = make_linear()
    input_ids, positions, alone = packed(kit, model)
    model.model.model._forward_pre_hooks.clear()
    wrong = model(input_ids, position_ids=positions).logits
    torch.testing.assert_close(wrong[:, :7], alone[:, :7], **TOLERANCE)
    assert (wrong[:, 8:] - alone[:, 8:]).abs().max() > 1e-2


@torch.no_grad()
def test_rows_may_have_different_borders(make_linear, kit):
    model, input_ids = make_linear(), kit.tokens(2, 12)
    positions = torch.stack([torch.arange(12), torch.cat([torch.arange(5), torch.arange(7)])])
    logits = model(input_ids, position_ids=positions).logits
    torch.testing.assert_close(logits[:1], model(input_ids[:1]).logits, **TOLERANCE)
    torch.testing.assert_close(logits[1:, 5:], model(input_ids[1:, 5:]).logits, **TOLERANCE)


@torch.no_grad()
@some_families
@pytest.mark.parametrize("mode", ["hybrid", "softmax"])
def test_positions_may_jump_within_a_document(kit, small_window, mode):
    """Against the same positions with a mask, which transformers never divides into documents."""
    model, input_ids = small_window, kit.tokens(2, 20)
    positions = torch.stack([torch.arange(20) + 3, torch.arange(20) + 9 * (torch.arange(20) > 11)])
    call = {"attention_call": AttentionCall(mode=mode)}
    masked = {"position_ids": positions, "attention_mask": torch.ones(2, 20).long()}
    for module in (model, model.get_decoder()):  # as the model is called, and as training calls it
        expected = module(input_ids, **masked, use_cache=False, **call)[0]
        found = module(input_ids, rotary_positions=positions, use_cache=False, **call)[0]
        torch.testing.assert_close(found, expected, **TOLERANCE)
    expected = model(input_ids, **masked, **call).logits
    wrong = model(input_ids, position_ids=positions, **call).logits  # the second row's jump begins a document
    torch.testing.assert_close(wrong[:, :12], expected[:, :12], **TOLERANCE)
    assert (wrong[1, 12:] - expected[1, 12:]).abs().max() > 1e-3


@torch.no_grad()
def test_masks_that_linear_attention_cannot_express_are_refused(make_linear, kit):
    model, input_ids = make_linear(), kit.tokens(1, 6)
    with pytest.raises(ValueError, match="4 dimensions"):
        model(input_ids, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match="4 dimensions"):
        model(input_ids, attention_mask=attention.lolcats_mask(1, 6, 6, use_vmap=True, allow_is_causal_skip=False))
    softmax_layer = make_linear(exact=[0])
    _, cache = kit.in_pieces(softmax_layer, input_ids, [6])
    with pytest.raises(ValueError, match="must cover the cached tokens"):
        softmax_layer(input_ids[:, :1], attention_mask=torch.zeros(1, 1).long(), past_key_values=cache)


@torch.no_grad()
def test_a_mask_that_generate_made_reaches_the_layers(make_linear, kit):
    """transformers makes the mask before the forward pass where it compiles that."""
    model, input_ids, mask = make_linear(exact=[0]), kit.tokens(2, 12), kit.padding([12, 7], 12)
    made = attention.lolcats_mask(2, 12, 12, attention_mask=mask.bool())
    expected = model(input_ids, attention_mask=mask).logits
    assert torch.equal(model(input_ids, attention_mask=made).logits, expected)
    assert not torch.equal(model(input_ids).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama3", "gemma2", "gpt-oss", "gpt-neox"])
def test_observers_see_what_the_layer_sees(kit, family):
    """The softmax output that they get comes from the tensors and settings that they get."""
    model = kit.linearized(kit.build(family), window_size=2, sliding_layers="linearize")
    input_ids, mask = kit.tokens(2, 12), kit.padding([12, 7], 12)
    seen = {}

    def observe(module, layer_idx, q, k, v, y_softmax, call):
        seen[layer_idx] = (module, q, k, v, y_softmax, call)

    expected = model(input_ids, attention_mask=mask, attention_call=SOFTMAX).logits
    call = AttentionCall(mode="softmax", observe=observe)
    observed = model(input_ids, attention_mask=mask, use_cache=False, attention_call=call).logits
    assert torch.equal(observed[mask.bool()], expected[mask.bool()])
    tokens = int(mask.sum())
    modules = dict(model.linear_layers())
    assert sorted(seen) == sorted(modules) == [0, 1]
    for index, (module, q, k, v, y_softmax, call) in seen.items():
        assert module is modules[index]
        assert q.shape == (1, module.num_heads, tokens, module.head_dim)
        assert k.shape == v.shape == (1, module.num_kv_heads, tokens, module.head_dim)
        assert y_softmax.shape == q.shape
        torch.testing.assert_close(softmax_attention(q, k, v, **call), y_softmax, **TOLERANCE)
        arguments = {name: value for name, value in call.items() if name != "sliding_window"}
        y, _ = module(q, k, v, **arguments)
        assert y.shape == y_softmax.shape
        # the first block of the terrace is softmax attention
        torch.testing.assert_close(y[0, :, :2], y_softmax[0, :, :2], **TOLERANCE)
    if family == "gemma2":
        assert seen[0][5]["softcap"] == 3.0
        assert [seen[i][5]["sliding_window"] for i in (0, 1)] == [6, None]
    if family == "gpt-oss":
        assert seen[0][5]["sink_logits"].shape == (4,)


def plain_softmax_attention(q, k, v, scale, softcap, sink_logits, sliding_window, mask, cu_seqlens):
    """One query after another, in float64."""
    heads, tokens, keys = q.shape[1], q.shape[2], k.shape[2]
    k = k.repeat_interleave(heads // k.shape[1], 1)
    v = v.repeat_interleave(heads // v.shape[1], 1)
    out = torch.zeros_like(q)
    begins = [0] if cu_seqlens is None else cu_seqlens.tolist()
    for b in range(q.shape[0]):
        for i in range(tokens):
            at = keys - tokens + i
            first = 0 if sliding_window is None else max(at - sliding_window + 1, 0)
            first = max(first, *(begin - b * keys for begin in begins if begin <= b * keys + at), 0)
            seen = [j for j in range(first, at + 1) if mask is None or mask[b, j]]
            if not seen:
                continue
            for h in range(heads):
                score = k[b, h, seen] @ q[b, h, i] * scale
                if softcap is not None:
                    score = softcap * torch.tanh(score / softcap)
                extra = 0 if sink_logits is None else sink_logits[h].exp()
                weight = score.exp() / (score.exp().sum() + extra)
                out[b, h, i] = weight @ v[b, h, seen]
    return out


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("sliding_window", [None, 4])
@pytest.mark.parametrize("layout", ["plain", "padded", "packed", "longer", "one", "one-padded"])
def test_softmax_attention(softcap, sinks, sliding_window, layout, monkeypatch):
    monkeypatch.setattr(softmax, "QUERY_BLOCK", 5)  # several blocks
    tokens = {"longer": 6}.get(layout, 1 if layout.startswith("one") else 13)
    q = torch.randn(2, 4, tokens, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 13, 8, dtype=torch.float64)
    call = {
        "scale": 0.7,
        "softcap": softcap,
        "sink_logits": torch.randn(4, dtype=torch.float64) if sinks else None,
        "sliding_window": sliding_window,
        "mask": None,
        "cu_seqlens": None,
    }
    real = torch.ones(2, tokens, dtype=torch.bool)
    if layout.endswith("padded"):
        call["mask"] = torch.arange(13) >= torch.tensor([[0], [5]])
        real = call["mask"][:, -tokens:]
    if layout == "packed":
        call["cu_seqlens"] = torch.tensor([0, 4, 13, 19, 20, 26])
    y = softmax_attention(q, k, v, **call)
    expected = plain_softmax_attention(q, k, v, **call)
    real = real[:, None, :, None].expand_as(y)
    torch.testing.assert_close(y[real], expected[real])
    assert y.isfinite().all()


def test_one_query_that_is_padding_is_finite():
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1] = False
    y = softmax_attention(q, k, v, mask=mask)
    assert y.isfinite().all()
    torch.testing.assert_close(y[1], v[1, :, -1:].repeat_interleave(2, 0))  # it sees only itself


def test_dropout_is_applied_by_softmax_layers_only(make_linear, kit):
    model, input_ids = make_linear(exact=[0]), kit.tokens(1, 8)
    layers = model.model.model.layers
    layers[1].self_attn.attention_dropout = 0.5
    model.train()
    assert torch.equal(model(input_ids).logits, model(input_ids).logits)
    layers[0].self_attn.attention_dropout = 0.5
    assert not torch.equal(model(input_ids).logits, model(input_ids).logits)
