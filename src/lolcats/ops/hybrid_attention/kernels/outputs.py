"""Outputs of the hybrid attention: the launch of their kernel, and what the backward pass keeps of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.constants import LOG2_E
from lolcats.ops.hybrid_attention.kernels.operands import Operands, or_dummy, strides
from lolcats.ops.hybrid_attention.kernels.output_kernel import output_kernel
from lolcats.ops.hybrid_attention.kernels.states import States


@dataclass(frozen=True)
class Outputs:
    """y [B, H, T, D] and, where they were saved, what the backward pass needs of every row: den, the
    denominator; top, c_n times log2(e), both float32 [B, H, T]; arg, int32, the entry of the maximal key, or
    -1 - i for sink i.

    Against a target y holds the error, output minus target; delta minus its product with the output (zero where
    the denominator is clamped); square the sum of its squares; both float32 [B, H, T]. Otherwise these are None."""

    y: Tensor
    den: Tensor
    top: Tensor
    arg: Tensor
    delta: Tensor | None = None
    square: Tensor | None = None


def attend(operands: Operands, states: States | None, *, save: bool, target: Tensor | None = None) -> Outputs:
    """Outputs of all queries, from the states before every chunk (None without a linear part).

    target: [B, H, T, D], unit stride in D; for the error of the outputs instead of the outputs.
    """
    x = operands
    y = torch.empty_like(x.q)
    delta = square = None
    if target is not None:
        delta, square = (torch.empty(x.q.shape[:3], device=x.q.device, dtype=torch.float32) for _ in range(2))
    rows = (x.batch, x.heads, x.tokens if save else 0)
    den, top = (torch.empty(rows, device=x.q.device, dtype=torch.float32) for _ in range(2))
    arg = torch.empty(rows, device=x.q.device, dtype=torch.int32)

    def grid(meta):
        return (x.heads * query_tiles(x, meta["BM"]),)

    output_kernel(x.head_dim, x.q.dtype)[grid](
        x.q,
        x.k,
        x.v,
        or_dummy(x.q_weight, x.q),
        or_dummy(x.q_bias, x.q),
        or_dummy(x.k_weight, x.q),
        or_dummy(x.k_bias, x.q),
        x.gamma,
        x.q if states is None else states.prefix_S,
        x.q if states is None else states.prefix_z,
        or_dummy(x.sink_k, x.k),
        or_dummy(x.sink_v, x.v),
        *x.layout,
        y,
        den,
        top,
        arg,
        or_dummy(target, x.q),
        or_dummy(delta, x.q),
        or_dummy(square, x.q),
        *strides(x.q),
        *strides(x.k),
        *strides(x.v),
        *strides(x.sink_k),
        *strides(x.sink_v),
        *strides(y),
        *strides(target),
        x.tokens,
        x.chunks,
        0 if x.sink_k is None else x.sink_k.shape[2],
        x.scale * LOG2_E,
        SAVE=save,
        ERROR=target is not None,
        **x.constants(output_kernel),
    )
    return Outputs(y, den, top, arg, delta, square)


def query_tiles(x: Operands, rows: int) -> int:
    """Tiles of `rows` queries of one head; in a ragged batch they are the chunks."""
    return x.batch * triton.cdiv(x.tokens, rows) if x.slots is None else x.chunks
