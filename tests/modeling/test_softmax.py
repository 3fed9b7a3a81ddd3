"""Softmax attention of queries after a past, in one piece and in two, against all scores written out."""

import math

import pytest
import torch

from lolcats.modeling import softmax


def scores_written_out(q, k, v, scale):
    tokens, keys = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
    hidden = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).triu(keys - tokens + 1)
    return (q.double() @ k.mT * scale).masked_fill(hidden, -math.inf).softmax(-1) @ v


def case(tokens, keys, device, dtype, head_dim=16):
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(2, 4, tokens), (2, 2, keys), (2, 2, keys)]
    return [torch.randn(*shape, head_dim, generator=generator).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize(("tokens", "keys"), [(2, 3), (70, 71), (65, 200), (3, 300)])
def test_after_a_past(tokens, keys, monkeypatch):
    q, k, v = case(tokens, keys, "cpu", torch.float32)
    expected = scores_written_out(q, k, v, 0.3)
    y = softmax.softmax_attention(q, k, v, scale=0.3)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    q.requires_grad_()  # masked, in one piece
    torch.testing.assert_close(softmax.softmax_attention(q, k, v, scale=0.3).double(), expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(torch, "sigmoid", lambda x: torch.full_like(x, 0.5))  # a wrong share is found
    wrong = softmax.softmax_attention(q.detach(), k, v, scale=0.3)
    assert (wrong - expected).abs().max() > 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("tokens", "keys"), [(2, 3), (65, 200), (1024, 4099)])
def test_after_a_past_on_a_gpu(tokens, keys, head_dim):
    q, k, v = case(tokens, keys, "cuda", torch.bfloat16, head_dim)
    assert softmax._gives_log_sums(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    y = softmax.softmax_attention(q, k, v, scale=0.1)
    expected = scores_written_out(q, k, v, 0.1)
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=1e-2)  # bfloat16 has 8 bits
