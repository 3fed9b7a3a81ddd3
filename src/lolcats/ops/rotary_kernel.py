"""Rotary embedding of queries and keys in place, where they lie: as parts of one product, say.

liger-kernel's wants them contiguous, which costs copies of both. Importing this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.early_launch import early_launch, wait_for_inputs
from lolcats.ops.hybrid_attention.kernels.launch import next_power_of_2, plan_of


def takes_rotation(q_BHTD: Tensor, k_BGTD: Tensor, cos_BTR: Tensor) -> bool:
    """Whether `rotate` takes these: tokens at even distances, heads one behind another, pairs half of R <= D apart."""
    if cos_BTR.dim() != 3 or cos_BTR.stride(-1) != 1 or cos_BTR.shape[-1] % 2 or cos_BTR.shape[-1] > q_BHTD.shape[-1]:
        return False
    return all(_row_stride(x) is not None for x in (q_BHTD, k_BGTD))


def rotate(q_BHTD: Tensor, k_BGTD: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> None:
    """x cos + rotate_half(x) sin of each head's first R entries, over `q_BHTD` and `k_BGTD`; no gradient.

    Args:
        cos_BTR: [B or 1, T, R], like `sin_BTR`; the second half repeats the first (arXiv:2104.09864 in Llama's order).
    """
    tensors = q_BHTD, k_BGTD, cos_BTR, sin_BTR
    plan = plan_of(tensors, "rotate")

    def launches() -> tuple[()]:
        batch, heads, tokens, _ = q_BHTD.shape
        kv_heads, half = k_BGTD.shape[1], cos_BTR.shape[-1] // 2
        plan.launch(
            _kernel,
            (batch * tokens,),
            *tensors,
            _row_stride(q_BHTD),
            _row_stride(k_BGTD),
            0 if len(cos_BTR) == 1 else cos_BTR.stride(0),
            cos_BTR.stride(1),
            tokens,
            q_BHTD.stride(1),
            k_BGTD.stride(1),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=half,
            BLOCK_HEADS=next_power_of_2(heads),
            BLOCK_KV_HEADS=next_power_of_2(kv_heads),
            BLOCK_HALF=next_power_of_2(half),
            **early_launch(q_BHTD.device),
        )
        return ()

    with torch.cuda.device_of(q_BHTD):
        plan.run(tensors, launches)


def _row_stride(x_BHTD: Tensor) -> int | None:
    """The distance of tokens, counted over all rows; None: it varies, or entries are apart."""
    batch, _, tokens, _ = x_BHTD.shape
    b, _, t, d = x_BHTD.stride()
    if d != 1 or (batch > 1 and tokens > 1 and b != t * tokens):
        return None
    return t if tokens > 1 else b


@triton.jit(do_not_specialize=["tokens"])
def _kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_row,
    k_row,
    angle_b,
    angle_t,
    tokens,
    q_head,
    k_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: all heads of one token."""
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_HALF)
    angle = row // tokens * angle_b + row % tokens * angle_t + column
    cos = tl.load(cos_ptr + angle, mask=column < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=column < HALF, other=0.0).to(tl.float32)
    _rotate(q_ptr + row * q_row, q_head, cos, sin, HEADS, HALF, BLOCK_HEADS, BLOCK_HALF)
    _rotate(k_ptr + row * k_row, k_head, cos, sin, KV_HEADS, HALF, BLOCK_KV_HEADS, BLOCK_HALF)


@triton.jit
def _rotate(
    x_ptr, stride, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HALF: tl.constexpr
):
    head, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK_HALF)
    there = (head < HEADS)[:, None] & (column < HALF)[None, :]
    left_ptr = x_ptr + head[:, None].to(tl.int64) * stride + column[None, :]
    left = tl.load(left_ptr, mask=there, other=0.0).to(tl.float32)
    right = tl.load(left_ptr + HALF, mask=there, other=0.0).to(tl.float32)
    tl.store(left_ptr, (left * cos[None, :] - right * sin[None, :]).to(x_ptr.dtype.element_ty), mask=there)
    tl.store(left_ptr + HALF, (right * cos[None, :] + left * sin[None, :]).to(x_ptr.dtype.element_ty), mask=there)
