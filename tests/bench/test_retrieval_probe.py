"""benchmarks/retrieval_probe.py: its weights are those that the attention function uses."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from lolcats.modeling.layer import HybridAttention
from lolcats.ops import HybridSpec


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield importlib.import_module("retrieval_probe")
    del sys.modules["retrieval_probe"]


@pytest.mark.parametrize("share_state", ["kv_head", "query_head"])
@pytest.mark.parametrize("sinks", [0, 2])
@torch.no_grad()
def test_weights_are_those_of_the_function(script, sinks, share_state):
    torch.manual_seed(0)
    module = HybridAttention(HybridSpec("terraced", 4, 2, sinks), 4, 2, 8, share_state=share_state)
    for parameter in module.parameters():
        parameter += 0.5 * torch.randn_like(parameter)
    q, k = torch.randn(4, 40, 8), torch.randn(2, 40, 8)
    number = torch.tensor([10, 11, 12])
    rows = script.probe_layer(module, q, k, torch.randn(2, 40, 8), number)
    marked = torch.zeros(1, 2, 40, 8)
    marked[:, :, number, 0] = 1.0  # the first channel of the output is the weight on these tokens
    y, _ = module(q[None], k[None], marked)
    assert [row["number"] for row in rows] == pytest.approx(y[0, :, -1, 0].tolist(), abs=1e-5)
    everything_linear = torch.zeros(1, 2, 40, 8)
    everything_linear[:, :, sinks:32, 0] = 1.0  # the last query's window begins at token 32
    y, _ = module(q[None], k[None], everything_linear)
    assert [row["linear share"] for row in rows] == pytest.approx(y[0, :, -1, 0].tolist(), abs=1e-5)


@torch.no_grad()
def test_a_number_in_the_cache_weighs_what_sinks_would(script):
    """Both stay exact: the first tokens as sinks, and the same tokens in a cache."""
    torch.manual_seed(0)
    module = HybridAttention(HybridSpec("terraced", 4, 2), 4, 2, 8)
    q, k = torch.randn(4, 40, 8), torch.randn(2, 40, 8)
    rows = script.probe_layer(module, q, k, torch.randn(2, 40, 8), torch.arange(3))
    module.spec = HybridSpec("terraced", 4, 2, sinks=3)
    marked = torch.zeros(1, 2, 40, 8)
    marked[:, :, :3, 0] = 1.0
    y, _ = module(q[None], k[None], marked)
    assert [row["number, cached"] for row in rows] == pytest.approx(y[0, :, -1, 0].tolist(), abs=1e-5)


@torch.no_grad()
def test_what_a_cache_keeps(script):
    """A cache for all that left the window keeps the number, a small one by leverage the keys unlike the others."""
    torch.manual_seed(0)
    module = HybridAttention(HybridSpec("terraced", 4, 2), 4, 2, 8)
    k, number = torch.randn(2, 40, 8), torch.tensor([10, 11, 20])
    k[0, number[:2]] *= 30
    v = torch.randn(2, 40, 8)
    assert script.kept(module, k, v, number, 40, "recall").all()
    assert script.kept(module, k, v, number, 2, "leverage")[0].tolist() == [True, True, False]
    row = script.probe_layer(module, torch.randn(4, 40, 8), k, v, number, 40)[0]
    assert row["kept"] == pytest.approx(1.0)


def test_positions_of_all_occurrences(script):
    assert script.positions([1, 5, 6, 2, 5, 6, 5], [5, 6]).tolist() == [1, 2, 4, 5]
