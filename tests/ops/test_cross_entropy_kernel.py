"""The kernel against PyTorch: on the GPU if there is one, else through Triton's interpreter."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from lolcats.ops import cross_entropy_kernel


@pytest.mark.parametrize("columns", [1, 37, 64, 200])
@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.0), (torch.float32, 0.25), (torch.bfloat16, 0.25)])
def test_loss_and_gradient(columns, factor, dtype, monkeypatch):
    monkeypatch.setattr(cross_entropy_kernel, "MAX_BLOCK", 64)  # several blocks a row
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = (torch.randn(5, columns, device=device) * 4 + 30).to(dtype)
    label = torch.randint(columns, (5,), device=device)
    label[0], label[1] = 0, columns - 1
    wanted = logits.double().requires_grad_()
    expected = cross_entropy(wanted * factor, label, reduction="none")
    expected.sum().backward()
    none = cross_entropy_kernel.cross_entropy_and_gradient_(logits[:0].clone(), label[:0], factor)
    loss = cross_entropy_kernel.cross_entropy_and_gradient_(logits, label, factor)
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-5)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-5}
    torch.testing.assert_close(logits.double(), wanted.grad, **tolerance)  # bfloat16 keeps 8 bits
    assert none.shape == (0,)
