"""Parts of a forward pass that evaluation and the engine share: an empty cache, some logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache


def new_cache(model: Any) -> Any:
    """An empty cache for `model`; linearized layers put their states in place of the empty layers."""
    return DynamicCache(config=model.config.get_text_config())


@contextmanager
def logits_at(model: Any, position_M: Tensor) -> Iterator[None]:
    """Within the block `model` gives logits [1, M, V] at some of the B * T positions, counted row by row.

    `logits_to_keep` picks the same columns of all rows, and the logits of all positions would fill memory.
    """

    def pick(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        features_BTD = args[0]
        return (features_BTD.flatten(0, 1)[position_M.to(features_BTD.device)][None],)

    hook = model.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        yield
    finally:
        hook.remove()
