"""The residual stream's sum and its RMS norm in one launch. Importing this module needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.early_launch import early_launch, wait_for_inputs
from lolcats.ops.hybrid_attention.kernels.launch import next_power_of_2, plan_of


def add_norm(residual_MN: Tensor, x_MN: Tensor, weight_N: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """residual + x, rounded to their type, and its RMS norm, rounded, times the weights, as Llama has it.

    Args:
        residual_MN: [..., N], contiguous, like the others.
        epsilon: is added to the mean of squares.
    """
    tensors = residual_MN, x_MN, weight_N
    plan = plan_of(tensors, "add norm", epsilon)

    def launches() -> tuple[Tensor, Tensor]:
        total_MN, normed_MN = plan.empty_like(x_MN), plan.empty_like(x_MN)
        columns = len(weight_N)
        block = next_power_of_2(columns)
        plan.launch(
            _kernel,
            (x_MN.numel() // columns,),
            residual_MN,
            x_MN,
            weight_N,
            total_MN,
            normed_MN,
            epsilon,
            COLUMNS=columns,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **early_launch(x_MN.device),
        )
        return total_MN, normed_MN

    with torch.cuda.device_of(x_MN):
        return plan.run(tensors, launches)


@triton.jit(do_not_specialize=["epsilon"])
def _kernel(
    residual, x, weight, total, normed, epsilon, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """One program: a row."""
    column = tl.arange(0, BLOCK)
    there = column < COLUMNS
    dtype: tl.constexpr = x.dtype.element_ty
    weight_N = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    at = tl.program_id(0).to(tl.int64) * COLUMNS + column
    residual_N = tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    total_N = (residual_N + tl.load(x + at, mask=there, other=0.0).to(tl.float32)).to(dtype)
    tl.store(total + at, total_N, mask=there)
    total_N = total_N.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total_N * total_N, 0) / COLUMNS + epsilon)
    normed_N = (total_N * scale).to(dtype).to(tl.float32) * weight_N
    tl.store(normed + at, normed_N.to(dtype), mask=there)
