"""The models of family_models.py as fixtures."""

from collections.abc import Callable
from typing import Any

import family_models
import pytest
from transformers import PreTrainedModel


@pytest.fixture(scope="session")
def kit() -> Any:
    """The functions of family_models.py."""
    return family_models


@pytest.fixture(scope="module", params=family_models.families())
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def original(family: str) -> PreTrainedModel:
    return family_models.build(family)


@pytest.fixture(scope="module")
def small_window(original: PreTrainedModel) -> Any:
    """Linearized with a window much smaller than the sequences of the tests."""
    return family_models.linearized(original, window="terraced", window_size=3, window_blocks=2)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return family_models.build("llama3")


@pytest.fixture
def make_linear(llama: PreTrainedModel) -> Callable[..., Any]:
    """Linearized copies of a small Llama."""

    def make(**attention: Any) -> Any:
        return family_models.linearized(llama, **({"window": "sliding", "window_size": 4} | attention))

    return make


@pytest.fixture
def model() -> Any:
    """A linearized Qwen2: biases in q, k, v; two query heads a KV head."""
    return family_models.linearized(family_models.build("qwen2"), window_size=3)
