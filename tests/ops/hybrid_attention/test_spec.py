"""HybridSpec: validation, windows."""

from __future__ import annotations

import pytest
import torch
from hybrid_loops import in_softmax_part

from lolcats.ops import HybridSpec


def test_default_is_the_published_layout() -> None:
    assert HybridSpec() == HybridSpec("terraced", 64, blocks=2, sinks=0, feature_map="hedgehog")
    assert hash(HybridSpec()) == hash(HybridSpec("terraced", 64))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": "terrace"}, "window='terrace': expected 'sliding' or 'terraced'"),
        ({"window_size": -1}, "window_size >= 0.*got window_size=-1, blocks=2, sinks=0"),
        ({"blocks": 0}, "blocks >= 1.*got window_size=64, blocks=0"),
        ({"sinks": -2}, "sinks >= 0.*sinks=-2"),
        ({"window_size": 0, "feature_map": None}, "window_size=0 without a feature_map leaves nothing"),
        ({"window_size": 0, "feature_map": None, "sinks": 2}, "window_size=0 without a feature_map"),
        ({"feature_map": "relu"}, "unknown feature map 'relu'"),
        ({"linear_length_cap": -1}, "linear_length_cap=-1: expected at least 0"),
        ({"linear_length_cap": 9, "feature_map": None}, "linear_length_cap .* needs both.*feature_map=None"),
        ({"linear_length_cap": 9, "window_size": 0}, "linear_length_cap .* needs both.*window_size=0 and sinks=0"),
        ({"linear_length_cap": 9, "window_size": 0, "decay": True}, "linear_length_cap .* needs both"),
    ],
)
def test_bad_specs_say_what_was_expected(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HybridSpec(**fields)


@pytest.mark.parametrize(
    "spec",
    [
        HybridSpec("sliding", 1),
        HybridSpec("sliding", 5),
        HybridSpec("sliding", 0),
        HybridSpec("terraced", 0),
        HybridSpec("terraced", 1),
        HybridSpec("terraced", 4, blocks=1),
        HybridSpec("terraced", 4),
        HybridSpec("terraced", 3, blocks=3),
    ],
    ids=str,
)
def test_window_start_is_the_first_key_of_the_definition(spec: HybridSpec) -> None:
    widest = 0
    for n in range(40):
        window = [j for j in range(n + 1) if in_softmax_part(spec, n, j)]
        start = min(window, default=n + 1)
        assert spec.window_start(torch.tensor(n)).item() == start
        widest = max(widest, len(window))
    assert spec.capacity == widest
    assert spec.window_start(torch.tensor([-1])).item() == 0


def test_reach_and_softmax() -> None:
    assert HybridSpec("sliding", 7).reach == 7
    assert HybridSpec("terraced", 7, blocks=3).reach == 14
    assert HybridSpec("terraced", 7, blocks=1).reach == 0
    assert not HybridSpec("sliding", 0).has_softmax
    assert HybridSpec("sliding", 0, sinks=1).has_softmax


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_block_leaves_where_the_window_moves(blocks):
    spec = HybridSpec("terraced", 5, blocks=blocks, sparse_cache=3)
    position = torch.arange(1, 41)
    moves = spec.window_start(position) > spec.window_start(position - 1)
    assert torch.equal(spec.block_leaves(position), moves)
    assert [spec.block_evicted([0, p]) for p in position.tolist()] == moves.tolist()
    assert HybridSpec("terraced", 5).block_evicted([1])
    assert HybridSpec("sliding", 0).block_evicted([1])
