"""What the supported releases of transformers call differently, told by what they have rather than by their number."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import GenerationMixin, cache_utils

# Keyword under which models take their cache and return it: "cache", until 5.23 "past_key_values".
_KEYWORDS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _KEYWORDS else "past_key_values"

# All names under which modules have taken it; GPT-NeoX's layers say layer_past.
CACHE_NAMES = (CACHE, "past_key_values", "layer_past")

# What stands in a cache for a layer that keeps nothing: one with another layer's keys, or without attention. Until 5.22
# there was none.
_PLACEHOLDER: Any = getattr(cache_utils, "DummyLayer", ())


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache among a module's keyword arguments, under whichever name."""
    found = (arguments.get(name) for name in CACHE_NAMES)
    return next((cache for cache in found if cache is not None), None)


def is_placeholder(layer: Any) -> bool:
    """Whether a cache's `layer` only stands for one that keeps nothing."""
    return isinstance(layer, _PLACEHOLDER)
