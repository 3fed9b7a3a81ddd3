"""Tiny finished runs to look into."""

from __future__ import annotations

import pytest
from rich.console import Console

from lolcats.config import DataSection, LinearizeConfig, merge
from lolcats.pipeline import linearize

QUIET = Console(quiet=True)


@pytest.fixture(scope="session")
def run_settings(model_dir, data_file, tmp_path_factory):
    """Configuration values of a run of a few seconds."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOLCATS_CACHE", str(cache))
        stage = {"batch_size": 2, "micro_batch_size": 2, "max_steps": 6, "eval_every": 3, "checkpoint_every": 6}
        yield {
            "model": {"path": str(model_dir), "device": "cpu"},
            "attention": {"window_size": 4},
            "data": {"sources": [{"path": str(data_file)}], "sequence_length": 48, "validation_rows": 10},
            "transfer": stage,
            "adjust": stage | {"lr": 1e-2},
        }


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
