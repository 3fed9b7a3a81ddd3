"""The kernel against float64: on the GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, silu

from lolcats.ops import few_rows_kernel
from lolcats.ops.few_rows_kernel import Tiles, few_rows, takes_product, tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
ACTIVATIONS = {None: None, "silu": silu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}


def relative_error(rows, outputs, inputs, dtype=torch.bfloat16, with_bias=False, activation=None):
    columns = outputs if activation is None else 2 * outputs
    x, weight = (
        torch.randn(rows, inputs, device=DEVICE).to(dtype),
        torch.randn(columns, inputs, device=DEVICE).to(dtype),
    )
    bias = torch.randn(columns, device=DEVICE).mul(inputs**0.5).to(dtype) if with_bias else None
    weight *= inputs**-0.5
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    if activation is not None:
        gate, up = expected.to(dtype).double().chunk(2, -1)
        expected = ACTIVATIONS[activation](gate) * up
    y = few_rows(x, weight, bias, activation)
    assert y.dtype == dtype
    assert y.shape == (rows, outputs)
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(2, 70, 64), (16, 64, 192), (17, 40, 128), (64, 130, 64)])
@pytest.mark.parametrize("width", [32, 64])
def test_equals_float64(rows, outputs, inputs, activation, with_bias, dtype, width, monkeypatch):
    """Rows and columns that fill their last tile, and that do not, with either side of the products first."""
    monkeypatch.setattr(few_rows_kernel, "tiles", lambda *given: Tiles(width, 64, 2))
    error = relative_error(rows, outputs, inputs, dtype, with_bias, activation)
    # gate and up are rounded, too, and their sums in float32 may fall to the other side of a half
    assert error < ROUNDING[dtype] * (1 if activation is None else 1.5)


LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "down": (4096, 14336), "head": (128256, 4096)}


def test_tiles():
    """As measured, of Llama 3 8B; the largest fit a multiprocessor of Hopper."""
    chosen = {name: [tiles(rows, *shape, gated=False) for rows in (16, 64)] for name, shape in LAYERS.items()}
    assert chosen["qkv"] == [Tiles(64, 128, 6)] * 2
    assert chosen["o"] == chosen["down"] == [Tiles(64, 128, 6), Tiles(32, 128, 6)]
    assert chosen["head"] == [Tiles(128, 128, 4)] * 2
    assert tiles(64, 14336, 4096, gated=True) == Tiles(64, 128, 4)
    assert tiles(9, 49152, 576, gated=False) == Tiles(128, 64, 4)
    for rows in (16, 32, 64):
        for gated in (False, True):
            for outputs, inputs in LAYERS.values():
                tile = tiles(rows, outputs, inputs, gated)
                assert (tile.outputs * (1 + gated) + rows) * tile.inputs * 2 * tile.stages <= 227 * 1024


def test_what_it_takes(monkeypatch):
    monkeypatch.setattr(few_rows_kernel, "is_hopper", lambda device: True)

    class Weight(tuple):
        shape, device, is_cuda = property(tuple), "cuda", True

    assert takes_product(64, Weight((6144, 4096)))
    assert takes_product(2, Weight((28672, 4096)), gated=True)
    assert not takes_product(1, Weight((6144, 4096)))
    assert not takes_product(65, Weight((6144, 4096)))
    assert not takes_product(64, Weight((6144, 4090)))
    assert not takes_product(64, Weight((2048, 8192)))  # too few programs
    assert not takes_product(64, Weight((960, 576)))
    assert not takes_product(64, torch.empty(6144, 4096, device="meta"))
    monkeypatch.setattr(few_rows_kernel, "is_hopper", lambda device: False)
    assert not takes_product(64, Weight((6144, 4096)))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [2, 16, 33, 64])
@pytest.mark.parametrize("layer", LAYERS)
def test_real_sizes(layer, rows):
    for with_bias in (False, True):
        assert relative_error(rows, *LAYERS[layer], with_bias=with_bias) < ROUNDING[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [2, 16, 33, 64])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_real_gated_mlp(activation, rows):
    assert relative_error(rows, 14336, 4096, activation=activation) < 1.5 * ROUNDING[torch.bfloat16]
