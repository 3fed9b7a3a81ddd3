"""Where versions of vLLM differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from packaging.version import Version
from torch import nn
from vllm import __version__

from lolcats.errors import UserError


@contextmanager
def attention_in_modules(model: nn.Module) -> Iterator[None]:
    """Inside, attention layers are modules of `model`; what takes their places there is what it uses afterwards.

    For models that it runs with transformers' code, vLLM before 0.30 keeps the layers in a table beside the modules,
    and sets their scale in each call.
    """
    table: dict[int, Any] = getattr(model, "attention_instances", {})
    attention: list[Any] = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")]
    owners = {module.layer_idx: module for module in attention}
    for index, layer in table.items():
        layer.impl.scale = owners[index].scaling
        owners[index].attn = layer
    yield
    for index in table:
        table[index] = owners[index].attn


def check_prefix_caching(enabled: bool) -> None:
    """Raises UserError where states that vLLM takes from its prefix cache are wrong (seen with 0.27.1)."""
    if enabled and Version(__version__) < Version("0.28"):
        raise UserError(
            f"vLLM {__version__} takes wrong states from its prefix cache: start it with --no-enable-prefix-caching,"
            " or install 0.28 or later"
        )


def has_prefix_units() -> bool:
    """Whether prefixes may end inside blocks (`prefix_match_unit`); earlier versions were not tested with it."""
    return Version(__version__) >= Version("0.32")
