"""The command line run in this process, with everything heavy replaced."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from lolcats.cli.app import app
from lolcats.modeling.loading import locate


@pytest.fixture
def cli(monkeypatch):
    """`cli("linearize", "model", ...)` -> click's result, with a terminal wide enough for whole lines."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")

    def run(*arguments: str):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def replace_module(monkeypatch):
    """`replace_module("lolcats.x", name=value)`: commands that import these names get other ones."""

    def replace(name: str, **attributes):
        module = importlib.import_module(name)
        for key, value in attributes.items():
            monkeypatch.setattr(module, key, value)

    return replace


@pytest.fixture
def pipeline_calls(replace_module, monkeypatch):
    """The arguments of each call of `pipeline.linearize`, which does nothing; a hub's model has 2048 positions."""
    calls = []

    def linearize(config, output, **options):
        calls.append((config, output, options))
        return {}

    replace_module("lolcats.pipeline", linearize=linearize)
    model = SimpleNamespace(config=LlamaConfig(max_position_embeddings=2048))

    def find(section, **given):
        return locate(section, **given) if Path(section.path).is_dir() else model

    replace_module("lolcats.modeling.loading", locate=find)
    return calls
