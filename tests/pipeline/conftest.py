"""Runs of the whole pipeline on a tiny model."""

from functools import reduce

import pytest
from rich.console import Console

from lolcats.config import LinearizeConfig, merge
from lolcats.pipeline import linearize


@pytest.fixture(scope="session")
def settings(run_settings):
    """As `run_settings`, with dropout, so that a resumed run needs its random state."""
    return merge(run_settings, {"adjust": {"lora_dropout": 0.1}})


@pytest.fixture(scope="session")
def run(settings):
    """run(output, *changes, console, **options) -> the report of `linearize` with changed settings."""

    def call(output, *changes, **options):
        config = LinearizeConfig.from_dict(reduce(merge, changes, settings))
        return linearize(config, output, **{"console": Console(quiet=True), **options})

    return call
