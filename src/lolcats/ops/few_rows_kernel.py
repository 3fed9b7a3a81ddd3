"""A linear layer's product with 2 to 64 rows, on Hopper, with the activation of a gated MLP if that follows.

Reading the weights is what it costs. For the large layers of Llama 3 8B cuBLAS takes up to 14 % longer on an H200, and
leaves gate and up in memory for another launch. Importing this module needs Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.early_launch import ask_for, early_launch, wait_for_inputs
from lolcats.ops.gated_activation_kernel import activated
from lolcats.ops.hybrid_attention.kernels.launch import cdiv, is_hopper, next_power_of_2
from lolcats.ops.hybrid_attention.kernels.tiles import dot

MOST_ROWS = 64
LEAST_WEIGHTS = 1 << 23  # smaller layers wait for launches rather than for memory
LEAST_PROGRAMS = 96  # of fewer, too many of a Hopper GPU's 132 multiprocessors have none


class Tiles(NamedTuple):
    """What a program takes at a time: outputs, inputs, and how many such tiles of weights are on their way."""

    outputs: int
    inputs: int
    stages: int


def tiles(rows: int, outputs: int, inputs: int, gated: bool) -> Tiles:
    """The fastest on an H200 for Llama 3 8B's layers, of `outputs` columns of the result."""
    width = 128 if inputs % 128 == 0 else 64
    if gated:
        return Tiles(64, width, 4)
    if outputs > 16384:
        return Tiles(128, width, 4)
    return Tiles(32 if rows > 32 and outputs < 6144 else 64, width, 6)


def takes_product(rows: int, weight_NK: Tensor, gated: bool = False) -> bool:
    """Whether `few_rows` computes this, and has been found faster than cuBLAS there."""
    columns, inputs = weight_NK.shape
    outputs = columns // 2 if gated else columns
    if not 1 < rows <= MOST_ROWS or inputs % 64 or columns * inputs < LEAST_WEIGHTS:
        return False
    if cdiv(outputs, tiles(rows, outputs, inputs, gated).outputs) < LEAST_PROGRAMS:
        return False
    return weight_NK.is_cuda and is_hopper(weight_NK.device)


def few_rows(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, activation: str | None = None) -> Tensor:
    """x weight^T + bias [M, N] in the type of `x_MK`, summed in float32.

    Args:
        x_MK: of at most `MOST_ROWS` rows; contiguous, like the others; in half precision. K is a multiple of 64.
        activation: "silu" or "gelu_tanh": the weights are those of gate and up, one behind another, and the result is
            activation(gate) * up [M, N / 2], from gate and up as they are in that type.
    """
    rows, inputs = x_MK.shape
    outputs = len(weight_NK) // (1 if activation is None else 2)
    y_MN = x_MK.new_empty(rows, outputs)
    tile = tiles(rows, outputs, inputs, activation is not None)
    with torch.cuda.device_of(x_MK):
        _kernel[(cdiv(outputs, tile.outputs),)](
            x_MK,
            weight_NK,
            bias_N,
            y_MN,
            rows,
            outputs,
            K=inputs,
            M=max(next_power_of_2(rows), 16),
            BN=tile.outputs,
            BK=tile.inputs,
            STAGES=tile.stages,
            ACTIVATION=activation,
            num_warps=4,
            **early_launch(x_MK.device),
        )
    return y_MN


@triton.jit
def _product(weight_NK, x_MK, acc, OUTPUTS_FIRST: tl.constexpr):
    """acc + the product, [N, M] or [M, N]."""
    return dot(weight_NK, x_MK.T, acc) if OUTPUTS_FIRST else dot(x_MK, weight_NK.T, acc)


@triton.jit
def _rounded(acc, bias, n, OUTPUTS_FIRST: tl.constexpr, dtype: tl.constexpr):
    """The sums with the bias, as numbers of the result's type, in float32."""
    if bias is not None:
        bias_N = tl.load(bias + n).to(tl.float32)
        acc += bias_N[:, None] if OUTPUTS_FIRST else bias_N[None, :]
    return acc.to(dtype).to(tl.float32)


@triton.jit
def _kernel(
    x,
    weight,
    bias,
    y,
    rows,
    outputs,
    K: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: BN columns of the result. Rows and columns beyond the ends repeat the last ones and are not stored.

    Products have the larger side first, which Hopper's matrix units want: the outputs, where there are enough.
    """
    OUTPUTS_FIRST: tl.constexpr = BN >= 64
    dtype: tl.constexpr = y.dtype.element_ty
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, M)
    k = tl.arange(0, BK)
    n_in = tl.minimum(n, outputs - 1)
    x_MK = x + tl.minimum(m, rows - 1)[:, None] * K + k[None, :]
    w_NK = weight + n_in.to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros([BN, M] if OUTPUTS_FIRST else [M, BN], tl.float32)
    up = tl.zeros([BN, M] if OUTPUTS_FIRST else [M, BN], tl.float32)
    second = outputs.to(tl.int64) * K
    if EARLY:
        line = tl.arange(0, 8) * 64  # of 128 bytes, the first of each row
        first = weight + n_in.to(tl.int64)[:, None] * K + tl.minimum(line, K - 64)[None, :]
        ask_for(first)
        if ACTIVATION is not None:
            ask_for(first + second)
    wait_for_inputs(EARLY)
    for begin in tl.range(0, K, BK, num_stages=STAGES):
        part_MK = tl.load(x_MK + begin)
        acc = _product(tl.load(w_NK + begin), part_MK, acc, OUTPUTS_FIRST)
        if ACTIVATION is not None:
            up = _product(tl.load(w_NK + second + begin), part_MK, up, OUTPUTS_FIRST)
    acc = _rounded(acc, bias, n_in, OUTPUTS_FIRST, dtype)
    if ACTIVATION is not None:
        upper_bias = None if bias is None else bias + outputs
        acc = activated(acc, ACTIVATION == "gelu_tanh") * _rounded(up, upper_bias, n_in, OUTPUTS_FIRST, dtype)
    if OUTPUTS_FIRST:
        tl.store(
            y + m[None, :] * outputs + n[:, None], acc.to(dtype), mask=(n < outputs)[:, None] & (m < rows)[None, :]
        )
    else:
        tl.store(
            y + m[:, None] * outputs + n[None, :], acc.to(dtype), mask=(n < outputs)[None, :] & (m < rows)[:, None]
        )
