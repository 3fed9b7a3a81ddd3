"""The command line run in this process, with everything heavy replaced."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

from lolcats.cli.app import app


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
    """Puts a module of the given attributes in the place of another, which is not imported then."""

    def replace(name: str, **attributes):
        module = ModuleType(name)
        for key, value in attributes.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        monkeypatch.setattr(importlib.import_module(parent), child, module, raising=False)

    return replace


@pytest.fixture
def pipeline_calls(replace_module, monkeypatch):
    """The arguments of each call of `pipeline.linearize`, which does nothing."""
    calls = []

    def linearize(config, output, **options):
        calls.append((config, output, options))
        return {}

    replace_module("lolcats.pipeline", linearize=linearize)
    monkeypatch.setattr("lolcats.cli.linearize.quiet_loading_bars", lambda: None)
    return calls
