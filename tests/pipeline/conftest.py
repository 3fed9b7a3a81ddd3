"""Runs of the whole pipeline on a tiny model."""

from functools import reduce

import pytest
from rich.console import Console

from lolcats.config import LinearizeConfig, merge
from lolcats.pipeline import linearize


@pytest.fixture(scope="session")
def settings(model_dir, data_file, tmp_path_factory):
    """Configuration values of a run of a few seconds."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOLCATS_CACHE", str(cache))
        stage = {"batch_size": 2, "micro_batch_size": 2, "max_steps": 6, "eval_every": 3, "checkpoint_every": 2}
        yield {
            "model": {"path": str(model_dir), "device": "cpu"},
            "attention": {"window_size": 4},
            "data": {"sources": [{"path": str(data_file)}], "sequence_length": 48, "validation_rows": 10},
            "transfer": stage,
            "adjust": stage | {"lr": 1e-2, "lora_dropout": 0.1},
        }


@pytest.fixture(scope="session")
def run(settings):
    """run(output, *changes, console, **options) -> the report of `linearize` with changed settings."""

    def call(output, *changes, **options):
        config = LinearizeConfig.from_dict(reduce(merge, changes, settings))
        return linearize(config, output, **{"console": Console(quiet=True), **options})

    return call
