"""Kernels that start while the one before them ends: programmatic dependent launches, on Hopper.

In a step of decoding hundreds of short kernels follow one another, and starting each takes about a microsecond in which
the memory idles. Launched so, a kernel's programs start as soon as those of the one before have all started, and wait
for its end by themselves; for weights they may ask before that. Importing this module needs Triton.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from lolcats.ops.hybrid_attention.kernels.launch import INTERPRETED, is_hopper

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # other devices, and older versions
    gdc_launch_dependents = gdc_wait = None


@cache
def early_launch(device: torch.device) -> dict[str, Any]:
    """Keywords of a launch whose kernel takes EARLY and calls `wait_for_inputs`."""
    early = gdc_wait is not None and not INTERPRETED and is_hopper(device)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Before it a kernel writes nothing, and reads only what stood there at the last launch of the ordinary kind.

    Those are weights: kernels of the latter kind wait for all before them, and a forward pass begins with some.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
