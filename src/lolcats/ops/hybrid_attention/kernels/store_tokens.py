"""New keys and values into their places in a cache, packed into 8 bits if it keeps these, in one launch.

A decoding step takes some twenty small ones for it otherwise. Importing this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.operands import next_power_of_2
from lolcats.ops.hybrid_attention.kernels.tiles import factor_of, levels_of


def store_tokens(
    k_BG1D: Tensor, v_BG1D: Tensor, keys_SGCE: Tensor, values_SGCE: Tensor, slot_B: Tensor, place_B: Tensor
) -> None:
    """One token a row: keys[slot, :, place] = k, values[slot, :, place] = v, or what `eight_bits.pack` makes of them.

    Args:
        keys_SGCE, values_SGCE: in a floating type with E = D, or int8 with a factor's four bytes behind the D entries.
        slot_B, place_B: int64. Of tokens with the same slot and place any may stay.
    """
    batch, heads, _, width = k_BG1D.shape
    with torch.cuda.device_of(k_BG1D):
        _kernel[(batch * heads, 2)](
            k_BG1D,
            v_BG1D,
            keys_SGCE,
            values_SGCE,
            slot_B,
            place_B,
            *k_BG1D.stride()[:2],
            *v_BG1D.stride()[:2],
            *keys_SGCE.stride()[:3],
            heads,
            D=width,
            BLOCK=next_power_of_2(width),
            PACKED=keys_SGCE.dtype == torch.int8,
            num_warps=1,
        )


@triton.jit(do_not_specialize=["heads"])
def _kernel(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    slot_ptr,
    place_ptr,
    k_b,
    k_g,
    v_b,
    v_g,
    to_s,
    to_g,
    to_c,
    heads,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One program: the key or the value of one token in one head."""
    g = (tl.program_id(0) % heads).to(tl.int64)
    b = (tl.program_id(0) // heads).to(tl.int64)
    to = tl.load(slot_ptr + b) * to_s + g * to_g + tl.load(place_ptr + b) * to_c
    if tl.program_id(1) == 0:
        _store(k_ptr + b * k_b + g * k_g, keys_ptr + to, D, BLOCK, PACKED)
    else:
        _store(v_ptr + b * v_b + g * v_g, values_ptr + to, D, BLOCK, PACKED)


@triton.jit
def _store(from_ptr, to_ptr, D: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    column = tl.arange(0, BLOCK)
    x = tl.load(from_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    if PACKED:
        factor = factor_of(x)
        tl.store(to_ptr + column, levels_of(x, factor).to(tl.int8), mask=column < D)
        tl.store((to_ptr + D).to(tl.pointer_type(tl.float32), bitcast=True), factor)
    else:
        tl.store(to_ptr + column, x.to(to_ptr.dtype.element_ty), mask=column < D)
