"""What was computed last in a forward pass, and from what: all layers of a model get the same borders of sequences.

On a GPU a table made from them costs some twenty launches, which this spares all layers but the first. Between two
passes memory may be written unseen, so that nothing is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class _Pass(threading.local):
    known: dict[Callable[..., Any], tuple[list, list[Tensor], Any]] | None = None  # None: outside of a pass


_pass = _Pass()


def begin_pass(*_: Any) -> None:
    """Forward pre-hook of a decoder."""
    if not torch.compiler.is_compiling():
        _pass.known = {}


def end_pass(*_: Any) -> None:
    """Forward hook of a decoder, which is always called."""
    if not torch.compiler.is_compiling():
        _pass.known = None


def remembered(build_from: Callable[..., Result], *sources: Tensor | Hashable) -> Result:
    """`build_from(*sources)`, or what it returned last time in this thread's forward pass if every tensor is the same
    memory, unwritten since, and all else is equal. Without a tensor among the sources, one of them says on which device
    the result will be.

    A compiler's graph must contain the computation, inference tensors do not count writes, and what inference mode
    makes cannot serve autograd: none of these remembers. A CUDA graph shares what was computed while it was captured.
    """
    if torch.compiler.is_compiling() or _pass.known is None:
        return build_from(*sources)
    tensors = [source for source in sources if isinstance(source, Tensor)]
    devices = [source for source in sources if isinstance(source, torch.device)] + [x.device for x in tensors]
    if torch.is_inference_mode_enabled() or any(x.is_inference() for x in tensors):
        return build_from(*sources)
    key = [_identity(source) if isinstance(source, Tensor) else source for source in sources]
    if any(device.type == "cuda" for device in devices):
        key += [torch.cuda.current_stream(devices[0]), torch.cuda.is_current_stream_capturing()]
    known = _pass.known.get(build_from)
    if known is None or known[0] != key:
        # The references to tensors keep their memory from becoming another tensor's.
        known = _pass.known[build_from] = (key, tensors, build_from(*sources))
    return known[2]


def _identity(x: Tensor) -> tuple:
    return x.data_ptr(), x.dtype, x.shape, x.stride(), x.device, x._version
