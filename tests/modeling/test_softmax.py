"""Softmax attention against its definition: windows, sinks, padding, documents, scores, queries after a past."""

import pytest
import torch
from softmax_written_out import written_out

from lolcats.modeling import softmax
from lolcats.modeling.softmax import softmax_attention

TOKENS = 33
MASKS = {
    "whole": {},
    "left padding": {"mask": torch.arange(TOKENS) >= torch.tensor([[0], [14], [30]])},
    "holes": {"mask": torch.rand(3, TOKENS, generator=torch.Generator().manual_seed(0)) > 0.4},
    "documents": {"cu_seqlens": torch.tensor([0, 3, 17, 33, 66, 70, 99])},
}
SCORES = {"plain": {}, "softcap": {"softcap": 2.0}, "sink logits": {"sink_logits": torch.tensor([0.3, -1.0, 0.0, 2.0])}}
WINDOWS = [(None, None), (4, None), (5, 2), (1, 0), (4, 7), (31, 1), (40, 1)]


def attend(q, k, v, window, sinks, mask=None, **given):
    if mask is not None:
        given["position"] = torch.where(mask, mask.cumsum(1) - 1, -1)
    return softmax_attention(q, k, v, sliding_window=window, sinks=sinks, **given)


def random_qkv(device="cpu", dtype=torch.float32, head_dim=8, tokens=TOKENS, batch=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(batch, n, tokens, head_dim, generator=generator).to(device, dtype) for n in (4, 2, 2)]


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("layout", MASKS)
@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
def test_softmax_attention_is_the_definition(window, sinks, layout, scores, monkeypatch):
    monkeypatch.setattr(softmax, "QUERY_BLOCK", 8)
    (q, k, v), given = random_qkv(), MASKS[layout] | SCORES[scores]
    real = given.get("mask", torch.ones(3, TOKENS)).bool()[:, None, :, None]
    expected = written_out(q, k, v, window=window, sinks=sinks, **given)
    for past in (0,) if layout == "documents" else (0, 1, 20, TOKENS - 1):
        for past_q in (q[:, :, past:], q[:, :, past:].clone().requires_grad_()):
            y = attend(past_q, k, v, window, sinks, **given)
            assert y.isfinite().all()
            torch.testing.assert_close(
                *(x * real[:, :, past:] for x in (y, expected[:, :, past:])), rtol=1e-4, atol=1e-5
            )
    if window is not None and window < 30:
        wrong = attend(q, k, v, window + 1, sinks, **given)
        assert ((wrong - expected) * real).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize(("window", "sinks"), [(5, 2), (1, 0), (4, 7), (31, 1)])
@pytest.mark.parametrize("past", [0, 1, 3, 20])
def test_a_window_without_masks(window, sinks, past, without_masks):
    """The keys before the first query may be those alone that it needs."""
    q, k, v = random_qkv()
    expected, place = written_out(q, k, v, window=window, sinks=sinks)[:, :, past:], torch.arange(TOKENS)
    kept = (place < sinks) | (place > past - window)
    for keep, where in ((slice(None), {}), (kept, {"position": place[kept][None], "in_order": True})):
        given = q[:, :, past:], k[:, :, keep], v[:, :, keep]
        y = softmax_attention(*given, sliding_window=window, sinks=sinks, **where)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert len(without_masks) == 2


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "sinks"), [(None, None), (256, 4)])
@pytest.mark.parametrize("past", [0, 700, 1499])
@pytest.mark.parametrize("head_dim", [64, 128])
@torch.no_grad()
def test_on_a_gpu(head_dim, past, window, sinks):
    q, k, v = random_qkv("cuda", torch.bfloat16, head_dim, 1500, 2)
    assert softmax.takes_window(q, k, v)
    y = softmax_attention(q[:, :, past:], k, v, sliding_window=window, sinks=sinks)
    place = torch.arange(1500, device="cuda")
    query = place[past:, None]
    seen = place <= query
    if window is not None:
        seen &= (place > query - window) | (place < sinks)
    k, v = (x.repeat_interleave(2, 1).float() for x in (k, v))
    score = q[:, :, past:].float() @ k.mT / head_dim**0.5
    torch.testing.assert_close(y.float(), score.masked_fill(~seen, -torch.inf).softmax(-1) @ v, rtol=2e-2, atol=1e-2)


def test_gradients_are_those_of_the_definition():
    torch.manual_seed(0)
    tensors = [torch.randn(2, 2, 24, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    given = {"sinks": 3, "mask": torch.arange(24) >= torch.tensor([[0], [9]])}
    weight = torch.randn(2, 2, 24, 8, dtype=torch.float64) * given["mask"][:, None, :, None]

    def gradients(y):
        return torch.autograd.grad((y * weight).sum(), tensors)

    found = gradients(attend(*tensors, 6, **given))
    expected = gradients(written_out(*tensors, window=6, **given))
    torch.testing.assert_close(found, expected)
    wrong = gradients(attend(*tensors, 7, **given))
    assert (wrong[1] - expected[1]).abs().max() > 1e-3


def test_one_query_that_is_padding_is_finite():
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1] = False
    y = attend(q, k, v, None, None, mask)
    assert y.isfinite().all()
    torch.testing.assert_close(y[1], v[1, :, -1:].repeat_interleave(2, 0))  # it sees only itself
