"""Layers share what follows from their positions and lengths, but nothing of another pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hybrid_cases import make_case
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops import hybrid_attention
from lolcats.ops.hybrid_attention import remember

SPECS = [
    AttentionConfig("terraced", 4, sinks=1, sparse_cache=5, cache_by="leverage"),
    AttentionConfig("terraced", 4, sinks=2, sparse_cache=3),
    AttentionConfig("terraced", 4, window_blocks=3, sinks=1),
]
# Tokens before, the padding of both sequences, and new tokens.
PASSES = [(9, (0, 0), 14), (9, (0, 5), 14), (9, (0, 5), 11), (4, (2, 0), 14), (4, (0, 2), 14)]


class Forgetful(dict):
    """In place of what is remembered: nothing."""

    def get(self, *_: Any) -> None:
        return None


class Equal(list):
    def __ne__(self, _: object) -> bool:
        return False


class Stale(dict):
    """In place of what is remembered: the first result is taken for every other."""

    def __setitem__(self, name: str, entry: tuple) -> None:
        super().__setitem__(name, (Equal(), *entry[1:]))


@torch.no_grad()
def alternate() -> list[Tensor]:
    """Outputs and states of the layers of several passes, whose positions lie in the same memory."""
    layers, found = [], []
    for before, padding, tokens in PASSES * 2:
        mask = torch.arange(before) < before - torch.tensor(padding)[:, None]
        for spec in SPECS + SPECS[::-1]:  # the spec of a pass's last layer is that of the next one's first
            case = make_case(spec, before + tokens, repeats=2, seed=len(layers))
            y_BHTD, state = case.part(0, before).run(hybrid_attention, mask=mask, return_state=True)
            assert state is not None
            layers.append((case.part(before, None), state))
            found += [y_BHTD, *state.tensors().values()]
    position_B = torch.zeros(2, dtype=torch.int64)
    for case, state in layers:
        if not torch.equal(position_B, state.position):  # another pass
            position_B.copy_(state.position)
        y_BHTD, after = case.run(hybrid_attention, state=replace(state, position=position_B), return_state=True)
        assert after is not None
        found += [y_BHTD, *after.tensors().values()]
    return found


def check(monkeypatch: pytest.MonkeyPatch, memory: dict) -> None:
    monkeypatch.setattr(remember, "_last", Forgetful())
    expected = alternate()
    monkeypatch.setattr(remember, "_last", memory)
    for one, other in zip(alternate(), expected, strict=True):
        assert torch.equal(one, other), "something of another pass"


def test_passes_alternate(monkeypatch):
    check(monkeypatch, {})


def test_a_stale_result_is_found(monkeypatch):
    """What the test above would find; results of another shape do not even fit."""
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check(monkeypatch, Stale())


def test_writing_that_is_overlooked_is_found(monkeypatch):
    known = remember._identity
    monkeypatch.setattr(remember, "_identity", lambda x: known(x)[:-1])
    with pytest.raises(AssertionError, match="another pass"):
        check(monkeypatch, {})


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_states_share_no_position(spec):
    """Decoding counts in place."""
    case = make_case(spec, 20)
    _, state = case.part(0, 9).run(hybrid_attention, return_state=True)
    assert state is not None
    ways = [case.part(9, None).run(hybrid_attention, state=state, return_state=True)[1] for _ in range(2)]
    ways.append(case.run(hybrid_attention, return_state=True)[1])
    ways.append(case.run(hybrid_attention, return_state=True)[1])
    assert len({way.position.data_ptr() for way in (state, *ways) if way is not None}) == 5
