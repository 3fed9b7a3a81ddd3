"""Linear layers of a few rows against float64, with every tile that is chosen, and results beside them untouched."""

from functools import partial
from itertools import product

import pytest
import torch
from kit import DEVICE
from torch.nn.functional import silu

from lolcats.ops import few_rows as module
from lolcats.ops.few_rows import few_rows, tiles

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
KINDS = {"one": 1, "three": 3, "gated": 2, "added": 1}


def relative_error(kind, rows, outputs, inputs, dtype):
    draw = partial(torch.randn, device=DEVICE, dtype=dtype)
    sizes = [outputs + 3 * n * (kind == "three") for n in range(KINDS[kind])]
    x, weights = draw(rows, 1, inputs), [draw(size, inputs) * inputs**-0.5 for size in sizes]
    residual = draw(rows, 1, outputs) if kind == "added" else None
    ys = few_rows(x, weights, kind == "gated", residual)
    expected = [x.double() @ weight.double().T for weight in weights]
    if kind == "gated":
        gate, up = (y.to(dtype).double() for y in expected)
        expected = [silu(gate).to(dtype).double() * up]
    expected = [y if residual is None else y.to(dtype).double() + residual.double() for y in expected]
    assert [(y.dtype, y.shape) for y in ys] == [(dtype, y.shape) for y in expected]
    return max(float((y - other).norm() / other.norm()) for y, other in zip(ys, expected, strict=True))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 17, 64, 65])
def test_equals_float64(rows, kind, dtype, monkeypatch):
    """Rows and columns that fill their last tile and that do not; with either side of the products first."""
    for width in (32, 64):
        monkeypatch.setattr(module, "tiles", lambda *given, width=width: (width, 64, 2))
        assert relative_error(kind, rows, 70, 128, dtype) < ROUNDING[dtype] * (1.5 if kind == "gated" else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 16, 33, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (1536, 8960), (4096, 14336), (32064, 1344)])
def test_real_layers(outputs, inputs, rows, kind):
    assert relative_error(kind, rows, outputs, inputs, torch.bfloat16) < 6e-3


def test_tiles_are_powers_of_two_and_fit_a_multiprocessor():
    layers = (6144, 4096), (4096, 14336), (128256, 4096), (1536, 8960), (100, 192)
    for rows, (outputs, inputs), gated in product((1, 2, 64), layers, (False, True)):
        width, depth, stages = tiles(rows, outputs, inputs, gated)
        assert (inputs % depth, width) == (0, width & -width)
        assert 2 * depth * stages * (width * (1 + gated) + max(rows, 16)) <= 227 * 1024
