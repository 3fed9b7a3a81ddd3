"""Takes the place of the GPU kernels in the code that a model's folder carries, which runs in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.utils import logging


def __getattr__(name: str) -> Callable[..., str]:
    """Whatever is imported from the kernels' modules: first of all, whether one supports a call."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _unsupported


def _unsupported(*args: Any, **kwargs: Any) -> str:
    logging.get_logger(__name__).warning_once("running without GPU kernels, which lolcats brings")
    return "This folder's code has no kernels: pip install lolcats."
