"""Storing tokens in one launch against packing and indexing them; on the GPU if there is one, else interpreted."""

import pytest
import torch

from lolcats.ops.eight_bits import FACTOR_BYTES, pack
from lolcats.ops.hybrid_attention.api import supports_store_tokens
from lolcats.ops.hybrid_attention.kernels.store_tokens import store_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, HEADS, PLACES = 5, 2, 7


def stored(head_dim, dtype, packed):
    """What the kernel and what PyTorch's operations leave in two caches."""
    kind, width = (torch.int8, head_dim + FACTOR_BYTES) if packed else (dtype, head_dim)
    caches = [torch.zeros(2, SLOTS, HEADS, PLACES, width, dtype=kind, device=DEVICE) for _ in range(2)]
    whole = torch.randn(3, 1, 3 * HEADS, head_dim, device=DEVICE).to(dtype).transpose(1, 2)
    whole[0, 0] = 0.0  # nothing to divide by
    whole[1, 1, :, 0] = 127.0  # numbers midway between two levels
    whole[1, 1, :, 1:] = torch.arange(head_dim - 1, device=DEVICE).to(dtype) + 0.5
    k, v = whole[:, :HEADS], whole[:, HEADS : 2 * HEADS]
    slot = torch.tensor([4, 0, 2], device=DEVICE)
    place = torch.randint(PLACES, (3,), device=DEVICE)
    assert supports_store_tokens(k, v, *caches[0]) is None
    store_tokens(k, v, *caches[0], slot, place)
    for cache, new in zip(caches[1], (k, v), strict=True):
        cache[slot, :, place] = (pack(new) if packed else new).squeeze(2)
    return caches


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 24, 64])
def test_equals_packing_and_indexing(head_dim, dtype, packed):
    found, expected = stored(head_dim, dtype, packed)
    assert torch.equal(found, expected)


def test_what_it_does_not_take():
    k, cache = (torch.zeros(size, device=DEVICE) for size in ((1, HEADS, 1, 16), (SLOTS, HEADS, PLACES, 16)))
    assert supports_store_tokens(k, k, cache, cache) is None
    assert "differ in shape" in supports_store_tokens(k, k[..., :8], cache, cache)
    assert "not adjacent" in supports_store_tokens(k[..., ::2], k[..., ::2], cache, cache)
    assert "float64" in supports_store_tokens(k.double(), k.double(), cache, cache)
