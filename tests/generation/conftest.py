"""A tiny linearized model with a tokenizer of bytes (generation_kit.py), and engines on it."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

from lolcats.generation.engine import Engine

sys.path.insert(0, str(Path(__file__).parent))

from generation_kit import Kit, make_model, make_tokenizer


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def model() -> Any:
    return make_model()


@pytest.fixture
def own_model(model: Any) -> Any:
    """A copy that a test may change."""
    return copy.deepcopy(model)


@pytest.fixture
def make_engine(model: Any, tokenizer: Any) -> Any:
    def make(other: Any = None, **settings: Any) -> Engine:
        return Engine(other or model, tokenizer, **({"max_slots": 4, "prefill_chunk": 16} | settings))

    return make
