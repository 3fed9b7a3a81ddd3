"""Plain eager calls: which they are, and what their checks and launches follow from.

A model makes the same few calls over and over. All that a call does on the host, but for allocating its outputs and
launching kernels, follows from its settings and from shapes, strides, types and alignment of its tensors. It is kept
for the next call with the same `call_key`, which then only replays it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# Kept of each kind; prompts come in many lengths.
MOST_CALLS = 1024
# Compiled kernels differ in what they assume of a pointer: that it is a multiple of this many bytes.
ALIGNMENT = 16


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


class Newest(dict):
    """The entries added last, so many at most."""

    def add(self, key: Hashable, value: Any) -> None:
        if len(self) >= MOST_CALLS:
            self.pop(next(iter(self)), None)
        self[key] = value


class Call:
    """What is kept of calls with one key.

    Attributes:
        route: which implementation takes them; their arguments fit each other.
        replay: what that implementation does with the tensors of the key and the state: outputs, and the state after.
            None: not only launches.
    """

    def __init__(self, route: str) -> None:
        self.route = route
        self.replay: Callable[[tuple[Tensor | None, ...], Any], tuple[Tensor, Any]] | None = None


def is_eager(tensors: Iterable[Tensor | None]) -> bool:
    """Whether nothing but autograd would look at an operator's call: no compiler, mode, transform or subclass."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and _PLAIN.issuperset(map(type, tensors))
    )


def signature(tensors: Sequence[Tensor | None]) -> tuple:
    """The device, and of each tensor what a launch depends on besides its contents. All are on one device."""
    known: list[Hashable] = [
        None if x is None else (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.data_ptr() % ALIGNMENT == 0)
        for x in tensors
    ]
    return (None if tensors[0] is None else tensors[0].device, *known)


def call_key(tensors: tuple[Tensor | None, ...], *others: Hashable) -> Hashable | None:
    """What tells calls apart for their checks and launches; None for calls that are not plain and eager."""
    return (*others, signature(tensors)) if is_eager(tensors) else None
