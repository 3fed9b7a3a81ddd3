"""Exact heads' queries, keys and values for vLLM's FlashAttention in one launch, against indexing and rounding."""

import pytest
import torch

from lolcats.vllm_plugin.take_heads import FP8, take_heads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS, TOKENS = 5, 4  # of vLLM's cache
GREATEST = torch.finfo(FP8).max


def rounded(x, scale, dtype):
    return (x.float() / scale).clamp(-GREATEST, GREATEST).to(FP8) if dtype == FP8 else x


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("shape", [(2, 7, 16, [1]), (4, 2, 24, [0, 3]), (3, 1, 32, [0, 1, 2])])
def test_equals_indexing(dtype, shape):
    kv_heads, group, head_dim, heads = shape
    widths = kv_heads * group * head_dim, kv_heads * head_dim, kv_heads * head_dim
    whole = (torch.randn(6, sum(widths), device=DEVICE) * 100).bfloat16()
    if DEVICE == "cpu":  # the interpreter rounds wrongly
        whole = whole.to(FP8).bfloat16()
    scales = torch.tensor([0.5, 4.0 if DEVICE == "cpu" else 3.0, 1.0], device=DEVICE).unbind()
    inputs = whole.split(widths, 1)  # as of one product for all three
    heads_E = torch.tensor(heads, device=DEVICE)
    slot_N = torch.tensor([7, -1, 19, 0, 13], device=DEVICE)  # the sixth token fills a graph up
    apart = torch.zeros(BLOCKS, len(heads) + 1, TOKENS, 2 * head_dim, device=DEVICE, dtype=torch.bfloat16).to(dtype)
    cache, expected = apart[:, 1:], apart.float()
    query = take_heads(inputs, heads_E, cache, slot_N, scales)

    taken = [x.unflatten(1, (kv_heads, -1))[:, heads] for x in inputs]
    taken = [rounded(x, scale, dtype).float() for x, scale in zip(taken, scales, strict=True)]
    new = torch.cat(taken[1:], 2)[: len(slot_N)]
    kept = slot_N >= 0
    expected[slot_N[kept] // TOKENS, 1:, slot_N[kept] % TOKENS] = new[kept]
    assert query.dtype == dtype
    assert torch.equal(query.float(), taken[0].unflatten(2, (group, head_dim)).flatten(1, 2))
    assert torch.equal(apart.float(), expected)
    assert len(take_heads([x[:0] for x in inputs], heads_E, cache, slot_N[:0], scales)) == 0
