"""Fixtures for all tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tests run in parallel processes; threads inside each would only compete."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    """Whatever a test draws from torch's generator does not depend on the tests before it."""
    torch.manual_seed(0)
