"""Which configuration a kernel is launched with: tile sizes, warps, stages, registers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from lolcats.ops.hybrid_attention.kernels.constants import INTERPRETED
from lolcats.ops.hybrid_attention.kernels.tiles import padded

# Rows of q, k, v beyond this take the configurations with smaller tiles: head_dim 256, or 128 in float32.
WIDE_ROW_BYTES = 256
# Integer arguments that change from call to call: kernels are compiled once for all their values.
SIZES = ("tokens", "chunks", "sinks_there", "splits", "tiles")
AUTOTUNE = not INTERPRETED and os.environ.get("LOLCATS_AUTOTUNE", "1") != "0"
# Without autotuning: which configuration of every list to take, modulo its length.
LAUNCH_CONFIG = int(os.environ.get("LOLCATS_LAUNCH_CONFIG", "0"))


class Tuned:
    """A kernel with two lists of launch configurations: for tiles of usual width, and for wide ones.

    A config maps block sizes, "warps", "stages" and, if given, "registers" (most per thread) to numbers.
    Autotuning tries the few of a list once per key and keeps the result on disk. The interpreter, and every
    process with LOLCATS_AUTOTUNE=0 (tests: fewer kernels to compile), takes one: LOLCATS_LAUNCH_CONFIG, 0 by default.

    Kernels whose products feed each other take 4 warps. Triton 3.6 lays such products out for Hopper with all
    warps along the rows, 16 each, however few rows there are. With 8 warps on 64 rows, and the same sum laid
    out otherwise in a loop, kernels crashed or had wrong sums on an H200.
    """

    # Constants that change what a kernel does or how much of it there is. A call has few values of each.
    key = (
        "D", "P", "MAP", "SLIDING", "W", "BLOCKS", "SINKS", "CROWDED", "SAVE", "ERROR", "NEED_INPUTS", "KEYS",
    )  # fmt: skip

    def __init__(self, kernel: Any, configs: Sequence[dict[str, int]], wide: Sequence[dict[str, int]]) -> None:
        self.kernel = kernel
        self.narrow, self.wide = self.autotuned(configs), self.autotuned(wide)

    def autotuned(self, configs: Sequence[dict[str, int]]) -> Any:
        """The kernel with one list of configurations."""
        choices = [
            triton.Config(
                {name: value for name, value in config.items() if name.isupper()},
                num_warps=config["warps"],
                num_stages=config["stages"],
                maxnreg=config.get("registers"),
            )
            for config in configs
        ]
        if not AUTOTUNE:
            choices = [choices[LAUNCH_CONFIG % len(choices)]]
        key = [name for name in self.key if name in self.kernel.arg_names]
        return triton.autotune(configs=choices, key=key, cache_results=True)(self.kernel)

    def __call__(self, head_dim: int, dtype: torch.dtype) -> Any:
        """The kernel for these tiles, to be launched as `tuned(head_dim, dtype)[grid](...)`."""
        return self.wide if padded(head_dim) * dtype.itemsize > WIDE_ROW_BYTES else self.narrow


def tuned(configs: Sequence[dict[str, int]], wide: Sequence[dict[str, int]]) -> Callable[[Any], Tuned]:
    """Decorator for a plain function: compile it, and choose its configuration as `Tuned` says."""

    def decorate(function: Callable) -> Tuned:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        kernel = triton.jit(function, do_not_specialize=[name for name in SIZES if name in names])
        return Tuned(kernel, configs, wide)

    return decorate
