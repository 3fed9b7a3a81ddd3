"""S in two 16-bit planes: a decoding step of a 16-bit model reads half of S, and S still accumulates in float32.

The first plane is S rounded to bfloat16, the second what is left of the float32 bit patterns, as integers:

    bits(S) = 2^16 upper + lower,    -2^15 <= lower < 2^15

Steps read the first plane alone. What adds to S, once a block, joins both, adds, and splits again: nothing is lost, and
the memory is that of float32. Both planes are int16, since copies of a floating type may change what looks like NaN.
Halves round away from zero, as the lower part has no 2^15.
"""

from __future__ import annotations

import torch
from torch import Tensor


def in_planes(S: Tensor) -> bool:
    return S.dtype == torch.int16


def split_sums(S: Tensor) -> Tensor:
    """float32 [..., F, D] to planes [..., 2, F, D]; planes stay as they are."""
    if in_planes(S):
        return S
    lower, upper = S.contiguous().view(torch.int16).unflatten(-1, (-1, 2)).unbind(-1)  # little-endian
    return torch.stack([upper - (lower >> 15), lower], dim=-3)


def join_sums(S: Tensor) -> Tensor:
    """The inverse of `split_sums`; what is not planes stays as it is."""
    if not in_planes(S):
        return S
    upper, lower = S.unbind(-3)
    return torch.stack([lower, upper + (lower >> 15)], dim=-1).flatten(-2).view(torch.float32)
