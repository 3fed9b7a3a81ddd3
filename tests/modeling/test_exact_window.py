"""Exact heads with a window: the definition, written out over positions, and every path that must equal it."""

from __future__ import annotations

import math

import pytest
import torch

from lolcats.errors import UserError
from lolcats.modeling import attention as attention_module
from lolcats.modeling import softmax
from lolcats.modeling.cache_size import cache_bytes, cache_sizes, window_in_budget
from lolcats.modeling.call import SOFTMAX, AttentionCall

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}  # float32, the same sums in another order
WINDOW, SINKS = 5, 2
EXACT = ["0.1", "1"]  # a layer of both kinds, and one of exact heads alone


def positions(batch, tokens, mask=None, cu_seqlens=None):
    """[B, T] lists: each real token's place in its sequence; None: padding."""
    found = []
    for b in range(batch):
        row, count = [], 0
        for t in range(tokens):
            count = 0 if cu_seqlens is not None and b * tokens + t in cu_seqlens.tolist() else count
            real = mask is None or bool(mask[b, t])
            row.append(count if real else None)
            count += real
        found.append(row)
    return found


def written_out(q, k, v, *, window, sinks, mask=None, cu_seqlens=None, scale=None, softcap=None, sink_logits=None):
    """A query at position t of its sequence sees the keys j <= t with j > t - window or j < sinks."""
    batch, heads, tokens, _ = q.shape
    repeats = heads // k.shape[1]
    place = positions(batch, tokens, mask, cu_seqlens)
    y = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b in range(batch):
        row = place[b]
        for t in range(tokens):
            if row[t] is None:
                continue
            same = range(0 if cu_seqlens is None else t - row[t], t + 1)
            seen = [i for i in same if row[i] is not None and (row[i] > row[t] - window or row[i] < sinks)]
            for h in range(heads):
                keys = k[b, h // repeats, seen].double()
                score = keys @ q[b, h, t].double() * (scale or 1 / math.sqrt(q.shape[3]))
                score = score if softcap is None else softcap * torch.tanh(score / softcap)
                if sink_logits is not None:
                    score = torch.cat([score, sink_logits[h : h + 1].double()])
                y[b, h, t] = score.softmax(0)[: len(seen)] @ v[b, h // repeats, seen].double()
    return y.to(q.dtype)


MASKS = {
    "whole": {},
    "left padding": {"mask": torch.arange(33) >= torch.tensor([[0], [14], [30]])},
    "holes": {"mask": torch.rand(3, 33, generator=torch.Generator().manual_seed(0)) > 0.4},
    "documents": {"cu_seqlens": torch.tensor([0, 3, 17, 33, 66, 70, 99])},
}
SCORES = {"plain": {}, "softcap": {"softcap": 2.0}, "sink logits": {"sink_logits": torch.tensor([0.3, -1.0, 0.0, 2.0])}}


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("layout", MASKS)
@pytest.mark.parametrize(("window", "sinks"), [(5, 2), (1, 0), (4, 7), (31, 1), (40, 1)])
def test_softmax_attention_is_the_definition(window, sinks, layout, scores, monkeypatch):
    monkeypatch.setattr(softmax, "QUERY_BLOCK", 8)
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 4, 33, 8), torch.randn(3, 2, 33, 8), torch.randn(3, 2, 33, 8)
    given, real = MASKS[layout] | SCORES[scores], MASKS[layout].get("mask", torch.ones(3, 33)).bool()

    def found(window, sinks):
        y = softmax.softmax_attention(q, k, v, sliding_window=window, sinks=sinks, **given)
        assert y.isfinite().all()
        return y.transpose(1, 2)[real]

    everything = written_out(q, k, v, window=window, sinks=sinks, **given).transpose(1, 2)
    expected = everything[real]
    torch.testing.assert_close(found(window, sinks), expected, rtol=1e-4, atol=1e-5)
    for wrong in ((window + 1, sinks), (window, sinks + 1)) if window < 30 else ():
        assert (found(*wrong) - expected).abs().max() > 1e-3
    if layout == "documents":
        return
    last = softmax.softmax_attention(q[:, :, -1:], k, v, sliding_window=window, sinks=sinks, **given)
    last_real = real[:, -1]
    torch.testing.assert_close(last[last_real, :, 0], everything[last_real, -1], rtol=1e-4, atol=1e-5)


@pytest.fixture(params=["llama3", "gemma3", "gpt-oss", "gemma4-shared-keys"])
def bounded(request, kit):
    """Layers of both kinds, in Gemma one with a native window."""
    attention = {
        "window_size": 3,
        "sinks": SINKS,
        "exact": EXACT,
        "exact_window": WINDOW,
        "sliding_layers": "linearize",
    }
    return kit.linearized(kit.build(request.param), **attention)


@torch.no_grad()
def test_whole_sequences(bounded, kit, monkeypatch):
    """All layers, with padding; where a layer has a native window, that alone counts."""
    tokens, mask = kit.tokens(2, 30), kit.padding([30, 17], 30)
    found = bounded(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()]
    right, calls = softmax.softmax_attention, []

    def plain(q, k, v, *, sinks, sliding_window, dropout, **given):
        if sinks is None:
            return right(q, k, v, sliding_window=sliding_window, **given)
        calls.append((sliding_window, sinks))
        return written_out(q, k, v, window=sliding_window, sinks=sinks, **given)

    monkeypatch.setattr(attention_module, "softmax_attention", plain)
    expected = bounded(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()]
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert set(calls) == {(WINDOW, SINKS)}
    monkeypatch.undo()
    bounded.set_attention(exact_window=WINDOW + 1)
    assert (bounded(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()] - expected).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize(("window", "sinks"), [(5, 2), (1, 0), (4, 7), (31, 1)])
@pytest.mark.parametrize("past", [0, 1, 3, 20])
def test_a_window_without_masks_is_the_definition(window, sinks, past, without_masks):
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, 33, 8), torch.randn(2, 2, 33, 8), torch.randn(2, 2, 33, 8)
    expected = written_out(q, k, v, window=window, sinks=sinks)[:, :, past:]
    place = torch.arange(33)

    def found(sinks):
        seen = (place < sinks) | (place > past - window)
        y = softmax.softmax_attention(q[:, :, past:], k, v, sliding_window=window, sinks=sinks)
        torch.testing.assert_close(
            softmax.softmax_attention(
                *(x[:, :, keep] for x, keep in ((q, place >= past), (k, seen), (v, seen))),
                sliding_window=window,
                sinks=sinks,
                position=place[seen][None],
                in_order=True,
            ),
            y,
            rtol=1e-4,
            atol=1e-5,
        )
        return y

    torch.testing.assert_close(found(sinks), expected, rtol=1e-4, atol=1e-5)
    assert len(without_masks) == 2
    assert (found(sinks + 1) - expected).abs().max() > 1e-3


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("past", [0, 700])
@pytest.mark.parametrize("head_dim", [64, 128])
@torch.no_grad()
def test_a_window_of_a_gpu(head_dim, past):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 1500 - past), (2, 2, 1500), (2, 2, 1500)]
    q, k, v = (torch.randn(*x, head_dim, generator=generator).to("cuda", torch.bfloat16) for x in shapes)
    assert softmax.takes_window(q, k, v)
    y = softmax.softmax_attention(q, k, v, sliding_window=256, sinks=4)
    place = torch.arange(1500, device="cuda")
    query = place[past:, None]
    seen = (place <= query) & ((place > query - 256) | (place < 4))
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    expected = (q.float() @ k.float().mT / head_dim**0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v.float()
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=1e-2)


@torch.no_grad()
def test_packed_documents_do_not_share_sinks(bounded, kit):
    tokens = kit.tokens(1, 30)
    position_ids = torch.cat([torch.arange(13), torch.arange(17)])[None]
    found = bounded(tokens, position_ids=position_ids, use_cache=False).logits
    for part in (slice(0, 13), slice(13, 30)):
        alone = bounded(tokens[:, part], use_cache=False).logits
        torch.testing.assert_close(found[:, part], alone, **TOLERANCE)


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
@pytest.mark.parametrize("family", ["llama3", "gemma3"])
def test_a_window_in_bytes_is_the_largest_that_fits(kit, family):
    """Gemma's first layer has a native window of 6 tokens."""
    attention = {"window_size": 3, "sinks": SINKS, "sliding_layers": "linearize"}
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


def test_gradients_are_those_of_the_definition():
    torch.manual_seed(0)
    tensors = [torch.randn(2, 2, 24, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    given = {"sinks": 3, "mask": torch.arange(24) >= torch.tensor([[0], [9]])}
    weight = torch.randn(2, 2, 24, 8, dtype=torch.float64) * given["mask"][:, None, :, None]

    def gradients(y):
        return torch.autograd.grad((y * weight).sum(), tensors)

    found = gradients(softmax.softmax_attention(*tensors, sliding_window=6, **given))
    expected = gradients(written_out(*tensors, window=6, **given))
    torch.testing.assert_close(found, expected)
    wrong = gradients(softmax.softmax_attention(*tensors, sliding_window=7, **given))
    assert (wrong[1] - expected[1]).abs().max() > 1e-3


def test_models_with_chunked_layers_are_refused(kit):
    with pytest.raises(ValueError, match="layers that attend within chunks"):
        kit.linearized(kit.build("llama4"), window_size=3, exact_window=9)
