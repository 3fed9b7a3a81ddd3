"""Updates in which the student has a smaller window, so that its linear part is used and learns."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any


def drops_window(probability: float, *, update: int, seed: int) -> bool:
    """Whether an update is one of them.

    The choice depends on nothing but the arguments: it is the same after resuming, in all processes, and for any
    size of micro-batches.
    """
    return random.Random(f"window dropout {seed} {update}").random() < probability


@contextmanager
def narrow_windows(layers: Iterable[Any], window_size: int) -> Iterator[None]:
    """Within the block, the `HybridAttention` modules `layers` have windows of `window_size`."""
    before = [(layer, layer.spec) for layer in layers]
    try:
        for layer, spec in before:
            layer.spec = replace(spec, window_size=window_size)
        yield
    finally:
        for layer, spec in before:
            layer.spec = spec
