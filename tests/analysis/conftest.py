"""Tiny finished runs to look into."""

import pytest
from rich.console import Console

from lolcats.config import DataSection, LinearizeConfig, merge
from lolcats.pipeline import linearize

QUIET = Console(quiet=True)


@pytest.fixture(scope="session")
def make_run(run_settings, tmp_path_factory):
    """`make_run(changes)` -> output folder of a run with changed settings."""

    def make(changes):
        output = tmp_path_factory.mktemp("run") / "out"
        linearize(LinearizeConfig.from_dict(merge(run_settings, changes)), output, console=QUIET)
        return output

    return make


@pytest.fixture(scope="session")
def finished(make_run):
    return make_run({})


@pytest.fixture(scope="session")
def held_out(run_settings, data_file):
    """Three packed sequences to measure on."""
    return DataSection.model_validate(
        {"sources": [{"path": str(data_file)}], "sequence_length": 48, "validation_sequences": 3}
    )
