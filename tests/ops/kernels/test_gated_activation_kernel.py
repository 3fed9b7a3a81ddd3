"""The kernel against PyTorch's functions: on the GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import gelu, silu

from lolcats.ops.gated_activation_kernel import gated_activation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACTIVATIONS = {"silu": silu, "gelu_tanh": partial(gelu, approximate="tanh")}
LAYOUTS = {
    "products of their own": lambda both: [half.contiguous() for half in both.chunk(2, -1)],
    "one product": lambda both: both.chunk(2, -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16,), (3, 7), (2, 5, 1500), (4, 1, 8)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_pytorch(activation, layout, shape, dtype):
    both = 3 * torch.randn(*shape[:-1], 2 * shape[-1], device=DEVICE, dtype=dtype)
    gate, up = LAYOUTS[layout](both)
    expected = (ACTIVATIONS[activation](gate.double()) * up.double()).to(dtype)
    unit = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    for _ in range(2):  # the second call is launched again
        found = gated_activation(gate, up, activation)
        torch.testing.assert_close(found, expected, rtol=unit, atol=unit / 10)
    # the comparison can fail: the halves changed places
    assert (gated_activation(up, gate, activation) - found).abs().max() > 0.01
