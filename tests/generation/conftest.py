"""Engines on a tiny linearized model (generation_kit.py)."""

import copy
from typing import Any

import pytest
from generation_kit import BOUNDED, HYBRID, kit_fixture, make_model, model_fixture, tokenizer_fixture  # noqa: F401

from lolcats.generation.engine import Engine


@pytest.fixture(scope="session", params=["linear", "hybrid", "bounded"])
def any_model(request: Any, model: Any) -> Any:
    return model if request.param == "linear" else make_model(**{"hybrid": HYBRID, "bounded": BOUNDED}[request.param])


@pytest.fixture
def own_model(model: Any) -> Any:
    """A copy that a test may change."""
    return copy.deepcopy(model)


@pytest.fixture
def make_engine(model: Any, tokenizer: Any) -> Any:
    def make(other: Any = None, **settings: Any) -> Engine:
        return Engine(other or model, tokenizer, **({"max_slots": 4, "prefill_chunk": 16} | settings))

    return make
