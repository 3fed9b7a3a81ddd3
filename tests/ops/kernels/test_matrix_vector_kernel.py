"""The kernel against float64: on the GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from lolcats.ops import matrix_vector_kernel
from lolcats.ops.matrix_vector_kernel import blocks, matrix_vector

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def relative_error(rows, columns, dtype, with_bias):
    x, weight = torch.randn(columns, device=DEVICE).to(dtype), torch.randn(rows, columns, device=DEVICE).to(dtype)
    bias = torch.randn(rows, device=DEVICE).mul(columns**0.5).to(dtype) if with_bias else None
    expected = weight.double() @ x.double() + (0 if bias is None else bias.double())
    y = matrix_vector(x, weight, bias)
    assert y.dtype == dtype
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (7, 37), (8, 64), (5, 200), (6, 256)])
@pytest.mark.parametrize("block", [(2, 64, 8), (1, 64, 4)])
def test_equals_float64(shape, with_bias, dtype, block, monkeypatch):
    """Rows and columns that fill their last block, and that do not."""
    monkeypatch.setattr(matrix_vector_kernel, "blocks", lambda rows, columns: block)
    # only the result is rounded, by half of a unit in the last place at most
    assert relative_error(*shape, dtype, with_bias) < {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (6144, 4096, (2, 2048, 8)),
        (4096, 4096, (2, 2048, 8)),
        (28672, 4096, (1, 2048, 4)),
        (4096, 14336, (1, 1024, 4)),
        (128256, 4096, (1, 2048, 4)),
        (960, 576, (2, 1024, 8)),
    ],
)
def test_blocks(rows, columns, expected):
    """As measured; those of a small model are not wider than its rows."""
    assert blocks(rows, columns) == expected


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(6144, 4096), (28672, 4096), (4096, 14336), (4097, 11008), (128256, 4096), (960, 576)]
)
def test_real_sizes(shape, dtype):
    for with_bias in (False, True):
        assert relative_error(*shape, dtype, with_bias) < {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
