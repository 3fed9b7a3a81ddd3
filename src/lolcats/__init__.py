"""Linearize pretrained language models: softmax attention out, linear attention and a small window in.

Importing this package teaches transformers' Auto classes to load linearized models. That happens when
transformers is imported, before or after: this package itself imports nothing heavy, so that
`lolcats --help` answers at once.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from lolcats.registration import register_with_transformers

if TYPE_CHECKING:
    from lolcats.config import LinearizeConfig
    from lolcats.modeling.configuration import LolcatsConfig
    from lolcats.modeling.model import LolcatsForCausalLM
    from lolcats.pipeline import linearize

__all__ = ["LinearizeConfig", "LolcatsConfig", "LolcatsForCausalLM", "__version__", "linearize"]

_HOMES = {
    "LinearizeConfig": "lolcats.config",
    "LolcatsConfig": "lolcats.modeling.configuration",
    "LolcatsForCausalLM": "lolcats.modeling.model",
    "linearize": "lolcats.pipeline",
}

register_with_transformers()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("lolcats")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
