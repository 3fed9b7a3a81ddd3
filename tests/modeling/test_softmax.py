"""Softmax attention against its definition: windows, sinks, sequences in a row, scores, queries after a past."""

import pytest
import torch
from softmax_written_out import written_out

from lolcats.modeling import softmax
from lolcats.modeling.softmax import Visible, softmax_attention
from lolcats.ops import Scoring

TOKENS = 33
LENGTHS = {"whole": [TOKENS], "sequences": [3, 14, 1, 0, 15], "many": [1] * 4 + [29]}
SCORES = {"plain": {}, "softcap": {"softcap": 2.0}, "sink logits": {"sink_logits": torch.tensor([0.3, -1.0, 0.0, 2.0])}}
WINDOWS = [(None, 0), (4, 0), (5, 2), (1, 0), (4, 7), (31, 1), (40, 1)]


def random_qkv(device="cpu", dtype=torch.float32, head_dim=8, tokens=TOKENS, batch=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(batch, n, tokens, head_dim, generator=generator).to(device, dtype) for n in (4, 2, 2)]


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("layout", LENGTHS)
@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
def test_softmax_attention_is_the_definition(window, sinks, layout, scores, monkeypatch):
    """Of the last queries of each sequence, too."""
    monkeypatch.setattr(softmax, "QUERY_BLOCK", 8)
    (q, k, v), given, lengths = random_qkv(batch=3 if layout == "whole" else 1), SCORES[scores], LENGTHS[layout]
    borders = torch.tensor([0, *lengths]).cumsum(0)
    apart = {} if layout == "whole" else {"cu_seqlens": borders}
    expected = written_out(q, k, v, window=window, sinks=sinks, **apart, **given)
    place = torch.cat([torch.arange(n) for n in lengths])
    for past in (0, 1, 12, max(lengths) - 1):
        late = place >= past
        if apart:
            fewer = [0, *torch.tensor([max(n - past, 0) for n in lengths]).cumsum(0).tolist()]
            apart = {"cu_seqlens": torch.tensor(fewer), "key_borders": borders.tolist()}
        for past_q in (q[:, :, late], q[:, :, late].clone().requires_grad_()):
            y = softmax_attention(past_q, k, v, Scoring(**given), Visible(window, sinks, **apart))
            torch.testing.assert_close(y, expected[:, :, late], rtol=1e-4, atol=1e-5)
        if window is not None and window < 30 and past == 0 and layout != "many":
            wrong = softmax_attention(q, k, v, Scoring(**given), Visible(window + 1, sinks, **apart))
            assert (wrong - expected).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize(("window", "sinks"), [(5, 2), (1, 0), (4, 7), (31, 1)])
@pytest.mark.parametrize("past", [0, 1, 3, 20])
def test_a_window_without_masks(window, sinks, past, without_masks):
    """The keys before the first query may be those alone that it needs."""
    q, k, v = random_qkv()
    expected, place = written_out(q, k, v, window=window, sinks=sinks)[:, :, past:], torch.arange(TOKENS)
    kept = (place < sinks) | (place > past - window)
    for keep in (slice(None), kept):
        y = softmax_attention(q[:, :, past:], k[:, :, keep], v[:, :, keep], visible=Visible(window, sinks))
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert len(without_masks) == 2


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (256, 4)])
@pytest.mark.parametrize("past", [0, 700, 1499])
@pytest.mark.parametrize("head_dim", [64, 128])
@torch.no_grad()
def test_on_a_gpu(head_dim, past, window, sinks):
    q, k, v = random_qkv("cuda", torch.bfloat16, head_dim, 1500, 2)
    assert softmax.takes_window(q, k, v)
    y = softmax_attention(q[:, :, past:], k, v, visible=Visible(window, sinks))
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
    tensors = [torch.randn(1, 2, 39, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    given = {"sinks": 3, "cu_seqlens": torch.tensor([0, 24, 39])}
    weight = torch.randn(1, 2, 39, 8, dtype=torch.float64)

    def gradients(y):
        return torch.autograd.grad((y * weight).sum(), tensors)

    found = gradients(softmax_attention(*tensors, visible=Visible(6, **given)))
    expected = gradients(written_out(*tensors, window=6, **given))
    torch.testing.assert_close(found, expected)
    wrong = gradients(softmax_attention(*tensors, visible=Visible(7, **given)))
    assert (wrong[1] - expected[1]).abs().max() > 1e-3


def test_sequences_of_new_lengths_need_no_plan(monkeypatch):
    """On Hopper PyTorch's attention takes cuDNN's, which would plan for each length anew: also with gradients."""
    (q, k, v), used, opened = random_qkv(batch=1), [], len(softmax._before)
    attend = softmax.scaled_dot_product_attention

    def watched(*args, **named):
        used.append((torch.backends.cuda.cudnn_sdp_enabled(), len(softmax._before) - opened))
        return attend(*args, **named)

    monkeypatch.setattr(softmax, "scaled_dot_product_attention", watched)
    softmax_attention(q.requires_grad_(), k, v, visible=Visible(cu_seqlens=torch.tensor([0, 9, 20, TOKENS])))
    assert used == [(False, 1)] * 3
    assert len(softmax._before) == opened
