"""What launches of Triton kernels ask of their surroundings."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
from torch import Tensor

# Triton's interpreter runs kernels on the CPU (TRITON_INTERPRET=1).
INTERPRETED = bool(triton.knobs.runtime.interpret)
# Kernels whose products feed each other take 4 warps: Triton 3.6 lays such products out for Hopper with all warps along
# the rows, 16 each, however few rows there are; with 8 warps on 64 rows kernels crashed or had wrong sums.
# Integer arguments that change from call to call: kernels are compiled once for all their values.
SIZES = ("tokens", "chunks", "heads", "kv_heads", "sinks_there", "splits", "tiles")

_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def is_eager(tensors: Iterable[Tensor | None]) -> bool:
    """Whether nothing but autograd would look at an operator's call: no compiler, mode, transform or subclass."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and _PLAIN.issuperset(map(type, tensors))
    )


def is_hopper(device: torch.device) -> bool:
    """Whether it is an H100 or an H200; the interpreter passes for one."""
    return INTERPRETED or (torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. `triton.cdiv` is for kernels: called on the host it takes longer than a launch."""
    return -(-a // b)


def next_power_of_2(size: int) -> int:
    """The least power of two that is not less than `size`, which is positive."""
    return 1 << (size - 1).bit_length()
