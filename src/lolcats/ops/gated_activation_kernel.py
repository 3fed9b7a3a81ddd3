"""activation(gate) * up, where one product has made both: read where they lie, in one launch.

Kernels for two tensors want them contiguous, which would cost two copies. Importing this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.early_launch import early_launch, wait_for_inputs
from lolcats.ops.hybrid_attention.kernels.launch import cdiv

_BLOCK = 1024


def gated_activation(both_M2I: Tensor, activation: str) -> Tensor:
    """[..., I] in the type of `both_M2I` [..., gate and up], contiguous; computed in float32, rounded once.

    Args:
        activation: "silu", or "gelu_tanh", GELU with the approximation by tanh.
    """
    columns = both_M2I.shape[-1] // 2
    y_MI = both_M2I.new_empty(*both_M2I.shape[:-1], columns)
    rows = y_MI.numel() // columns
    with torch.cuda.device_of(both_M2I):
        _kernel[(rows, cdiv(columns, _BLOCK))](
            both_M2I,
            y_MI,
            columns,
            GELU=activation == "gelu_tanh",
            BLOCK=_BLOCK,
            **early_launch(both_M2I.device),
        )
    return y_MI


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """SiLU, or GELU with the approximation by tanh: gate * sigmoid(u), as (1 + tanh(a)) / 2 = sigmoid(2 a)."""
    u = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    return gate * tl.sigmoid(u)


@triton.jit
def _kernel(both_ptr, y_ptr, columns, GELU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One program: some columns of one row."""
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < columns
    both_ptr += row * 2 * columns + column
    gate = tl.load(both_ptr, mask=there, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + columns, mask=there, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + column, (activated(gate, GELU) * up).to(y_ptr.dtype.element_ty), mask=there)
