"""A tiny run in one process, which the others are compared with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from lolcats.config import LinearizeConfig, merge
from lolcats.pipeline import linearize

sys.path.insert(0, str(Path(__file__).parent))  # for ranks.py


@pytest.fixture(scope="session")
def settings(model_dir, data_file, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOLCATS_CACHE", str(cache))
        stage = {"batch_size": 4, "micro_batch_size": 2, "max_steps": 4, "eval_every": 2, "checkpoint_every": 2}
        yield {
            "model": {"path": str(model_dir), "device": "cpu"},
            "attention": {"window_size": 4},
            "data": {"sources": [{"path": str(data_file)}], "sequence_length": 32, "validation_rows": 10},
            "transfer": stage,
            "adjust": stage | {"lr": 1e-2},
            "parallel": {"shard": "on"},
        }


@pytest.fixture(scope="session")
def alone(settings, tmp_path_factory):
    """alone(changes) -> the folder and report of the run in this process; each is made once."""
    made = {}

    def get(changes):
        key = str(changes)
        if key not in made:
            output = tmp_path_factory.mktemp("alone") / "out"
            config = LinearizeConfig.from_dict(merge(settings, changes))
            made[key] = output, linearize(config, output, console=Console(quiet=True))
        return made[key]

    return get
