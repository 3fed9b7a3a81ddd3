"""activation(gate) * up in one launch, from products of their own or one product that has made both.

Kernels for two tensors want them contiguous, which would cost two copies of the latter. Importing this module needs
Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.early_launch import early_launch, wait_for_inputs
from lolcats.ops.hybrid_attention.kernels.launch import cdiv, plan_of

_BLOCK = 1024


def gated_activation(gate_MI: Tensor, up_MI: Tensor, activation: str) -> Tensor:
    """[..., I] in the type of `gate_MI`, contiguous; computed in float32, rounded once; no gradient.

    Args:
        gate_MI, up_MI: [..., I], contiguous, or halves of the last dimension of a contiguous tensor.
        activation: "silu", or "gelu_tanh", GELU with the approximation by tanh.
    """
    tensors = gate_MI, up_MI
    plan = plan_of(tensors, "gated activation", activation)

    def launches() -> tuple[Tensor]:
        y_MI = plan.empty(gate_MI.shape, gate_MI.dtype)
        columns = y_MI.shape[-1]
        rows = y_MI.numel() // columns
        strides = (x.view(-1, columns).stride(0) for x in tensors)
        plan.launch(
            _kernel,
            (rows, cdiv(columns, _BLOCK)),
            *tensors,
            y_MI,
            *strides,
            columns,
            GELU=activation == "gelu_tanh",
            BLOCK=_BLOCK,
            **early_launch(gate_MI.device),
        )
        return (y_MI,)

    with torch.cuda.device_of(gate_MI):
        return plan.run(tensors, launches)[0]


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """SiLU, or GELU with the approximation by tanh: gate * sigmoid(u), as (1 + tanh(a)) / 2 = sigmoid(2 a)."""
    u = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    return gate * tl.sigmoid(u)


@triton.jit
def _kernel(
    gate_ptr, up_ptr, y_ptr, gate_row, up_row, columns, GELU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """One program: some columns of one row."""
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < columns
    gate = tl.load(gate_ptr + row * gate_row + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=there, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + column, (activated(gate, GELU) * up).to(y_ptr.dtype.element_ty), mask=there)
