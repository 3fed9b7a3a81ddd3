"""Rotation in place against transformers' function, for queries and keys that lie in one product and elsewhere."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partial

from lolcats.ops.rotary_kernel import rotate, takes_rotation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 3, 24


def angles(rows, tokens, width):
    half = torch.randn(rows, tokens, width // 2, device=DEVICE)
    both = torch.cat([half, half], -1)
    return both.cos(), both.sin()


def heads_of(x, count):
    return x.unflatten(-1, (count, HEAD_DIM)).transpose(1, 2)


LAYOUTS = {
    "one product": lambda q, k, v: torch.cat([q, k, v], -1).split([x.shape[-1] for x in (q, k, v)], -1)[:2],
    "products of their own": lambda q, k, v: (q, k),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("rows", [1, BATCH])
@pytest.mark.parametrize("width", [HEAD_DIM, 16])
def test_equals_transformers(layout, tokens, rows, width):
    q, k, v = (torch.randn(BATCH, tokens, n * HEAD_DIM, device=DEVICE) for n in (HEADS, KV_HEADS, KV_HEADS))
    cos, sin = angles(rows, tokens, width)
    expected = apply_partial(heads_of(q, HEADS), heads_of(k, KV_HEADS), cos, sin)
    if width == HEAD_DIM:
        whole = apply_rotary_pos_emb(heads_of(q, HEADS), heads_of(k, KV_HEADS), cos, sin)
        torch.testing.assert_close(whole, expected)
    q, k = LAYOUTS[layout](q, k, v)
    q, k = heads_of(q, HEADS), heads_of(k, KV_HEADS)
    assert takes_rotation(q, k, cos)
    rotate(q, k, cos, sin)
    torch.testing.assert_close((q, k), expected)
    rotate(q, k, cos, sin)  # once too often is found
    assert (q - expected[0]).abs().max() > 0.1


def test_what_it_does_not_take():
    q, k = (heads_of(torch.zeros(BATCH, 5, n * HEAD_DIM), n) for n in (HEADS, KV_HEADS))
    cos, _ = angles(1, 5, HEAD_DIM)
    assert takes_rotation(q, k, cos)
    assert not takes_rotation(q, k.contiguous(), cos)  # tokens of a head lie together
    assert not takes_rotation(q[..., ::2], k[..., ::2], cos)
    assert not takes_rotation(q, k, cos[:, None])
