"""The kernel against transformers' Llama: on the GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lolcats.ops.add_norm_kernel import add_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 576), (2, 1, 100), (4, 2048)])
@torch.no_grad()
def test_equals_llamas(shape, dtype):
    residual, x = (3 * torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(2))
    norm = LlamaRMSNorm(shape[-1], eps=1e-2).to(DEVICE, dtype)
    norm.weight.normal_()
    total, normed = add_norm(residual, x, norm.weight, norm.variance_epsilon)
    assert torch.equal(total, residual + x)
    unit = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]  # one in the last place
    torch.testing.assert_close(normed, norm(residual + x), rtol=unit, atol=1e-6)
    # the comparison can fail: another epsilon
    wrong = add_norm(residual, x, norm.weight, 1.0)[1]
    assert (wrong - normed).abs().max() > 0.01
