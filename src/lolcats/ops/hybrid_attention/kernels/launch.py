"""What all launches of Triton kernels share, and launches that start early.

In a step of decoding many short kernels follow one another, and starting each takes about a microsecond in which the
memory idles. With programmatic dependent launches, on Hopper, a kernel's programs start as soon as those of the one
before have all started, and wait for its end themselves; weights they may load before that.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # other devices, and older versions
    gdc_launch_dependents = gdc_wait = None

# Kernels whose products feed each other take 4 warps: Triton 3.6 lays such products out for Hopper with all warps along
# the rows, 16 each, however few rows there are; with 8 warps on 64 rows kernels crashed or had wrong sums.

# Triton's interpreter runs kernels on the CPU (TRITON_INTERPRET=1).
INTERPRETED = bool(triton.knobs.runtime.interpret)
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


@cache
def early_launch(device: torch.device) -> dict[str, Any]:
    """Keywords of a launch whose kernel takes EARLY and calls `wait_for_inputs`."""
    known = gdc_wait is not None and not INTERPRETED and torch.version.hip is None
    early = known and torch.cuda.get_device_capability(device) == (9, 0)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Before this call a kernel writes nothing, and reads only what was written before the last ordinary launch.

    That is true of weights: ordinary launches wait for all before them, and a forward pass begins with some.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. `triton.cdiv` is for kernels: called on the host it takes longer than a launch."""
    return -(-a // b)


def next_power_of_2(size: int) -> int:
    """The least power of two that is not less than `size`, which is positive."""
    return 1 << (size - 1).bit_length()
