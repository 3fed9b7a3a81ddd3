"""Keys and values of a cache in 8 bits: a token's entries in a head as int8, and the factor that they share.

A packed tensor is one int8 tensor [..., D + 4], whose last four bytes are the factor in float32. So whatever keeps keys
and values (transformers' cache layers, windows, the engine's slots) keeps packed ones as it would others.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 127
FACTOR_BYTES = 4


def pack(x: Tensor) -> Tensor:
    """[..., D] in any float type -> int8 [..., D + 4]; entries are off by at most 1/254 of the token's largest."""
    x = x.float()
    factor = (x.abs().amax(-1) * (1 / LEVELS))[..., None]  # a division by 127 rounds otherwise on a GPU
    levels = (x / factor.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    return torch.cat([levels, factor.contiguous().view(torch.int8)], -1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The reverse of `pack`, in `dtype`."""
    factor = packed[..., -FACTOR_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (packed[..., :-FACTOR_BYTES].float() * factor).to(dtype)


def dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`unpack`, where x is packed; else x itself."""
    return unpack(x, dtype) if is_packed(x) else x


def is_packed(x: Tensor) -> bool:
    return x.dtype == torch.int8
