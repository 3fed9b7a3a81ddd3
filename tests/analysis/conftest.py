"""Data to measure on."""

import pytest

from lolcats.config import DataSection


@pytest.fixture(scope="session")
def held_out(data_file):
    """Three packed sequences."""
    section = {"sources": [{"path": str(data_file)}], "sequence_length": 48, "validation_sequences": 3}
    return DataSection.model_validate(section)
