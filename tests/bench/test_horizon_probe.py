"""benchmarks/horizon_probe.py: what its factors leave of the attention function."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lolcats.modeling.layer import HybridAttention
from lolcats.ops import HybridSpec

LENGTH = 24


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield importlib.import_module("horizon_probe")
    del sys.modules["horizon_probe"]


@pytest.fixture
def layer():
    torch.manual_seed(0)
    module = HybridAttention(HybridSpec("terraced", 4, 2, sinks=1), 4, 2, 8)
    return module, (torch.randn(1, 4, 40, 8), torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8))


@torch.no_grad()
def test_up_to_the_training_length_only_nothing_changes_anything(script, layer):
    module, inputs = layer
    plain = module(*inputs)[0]
    for name, factor in script.factors(LENGTH).items():
        with script.weighed(factor):
            y = module(*inputs)[0]
        assert torch.equal(y[:, :, :LENGTH], plain[:, :, :LENGTH]) == (name != "nothing")
        assert torch.allclose(y, plain) == (name == "as trained")
    assert torch.equal(module(*inputs)[0], plain)  # and nothing stays behind


@torch.no_grad()
def test_nothing_is_the_window_and_the_sinks_alone(script, layer):
    module, inputs = layer
    with script.weighed(script.factors(LENGTH)["nothing"]):
        y = module(*inputs)[0]
    module.spec = replace(module.spec, feature_map=None)
    assert torch.allclose(y, module(*inputs)[0], atol=1e-6)
