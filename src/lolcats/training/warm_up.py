"""A model's first pass on its GPU, which loads libraries and kernels for seconds, while the host has other work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import torch

from lolcats.evaluation.perplexity import batch_losses


@contextmanager
def first_pass(model: Any, batch_size: int, tokens: int) -> Iterator[None]:
    """During the block, which does not use `model`, a thread evaluates it on a batch of zeros, if it is on a GPU.

    What fails there is left to the pass whose result is wanted.
    """
    if model.device.type != "cuda":
        yield
        return

    def run() -> None:
        with suppress(Exception):
            zeros_BT = torch.zeros(batch_size, tokens, dtype=torch.int64, device=model.device)
            batch_losses(model, {"input_ids": zeros_BT, "labels": zeros_BT})
            torch.cuda.synchronize(model.device)

    thread = Thread(target=run, name="first pass")
    thread.start()
    try:
        yield
    finally:
        thread.join()
