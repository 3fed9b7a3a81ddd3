"""Calls with the same key repeat the launches of the first, with little work on the host; other calls do not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernel_kit import DEVICE, Case, make_case
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention import eager
from lolcats.ops.hybrid_attention.api import initial_state
from lolcats.ops.hybrid_attention.kernels import launch

TERRACED = AttentionConfig("terraced", 4)


pytestmark = pytest.mark.usefixtures("fresh_plans")


@pytest.fixture
def launched(monkeypatch):
    """Kernels that were launched: `first`, as Triton does it, or `again`; those of the latter compute nothing."""
    counts = {"first": 0, "again": 0}
    first_launch = launch._first_launch

    def count_first(*arguments):
        counts["first"] += 1
        return first_launch(*arguments)

    def runner(*_):
        def again(*_, stream):
            counts["again"] += 1

        return again

    monkeypatch.setattr(launch, "_first_launch", count_first)
    monkeypatch.setattr(launch, "_runner", runner)
    return counts


def python_calls(function: Callable[[], object]) -> int:
    """Of functions written in Python."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count - 1  # its own


@torch.no_grad()
def test_the_host_does_little(launched, plain_memory):
    token = make_case(TERRACED, 1)
    state = initial_state(token.config, token.params, token.k)

    def step() -> object:
        return token.run("triton", state=state, return_state=True)

    step()
    launched.update(first=0, again=0)
    assert python_calls(step) <= 85  # looking at every argument of every launch took 179
    assert launched == {"first": 0, "again": 2}


def unaligned(x: Tensor) -> Tensor:
    """The same values, one entry behind an aligned address."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return memory[1:].view(x.shape).copy_(x)


def half_used(x: Tensor) -> Tensor:
    """The same values with twice the strides between tokens."""
    return torch.cat([x, x], dim=3)[..., : x.shape[3]]


@pytest.mark.parametrize(
    "change",
    [
        lambda case: case.part(0, 19),
        lambda case: case.map(lambda x: x.to(torch.bfloat16)),
        lambda case: replace(case, q=unaligned(case.q)),
        lambda case: replace(case, params=case.params._replace(gamma=unaligned(case.params.gamma))),
        lambda case: replace(case, v=half_used(case.v)),
        lambda case: case.with_config(window_size=5),
        lambda case: case.with_config(sinks=1),
        lambda case: replace(case, params=case.params._replace(sink_logits=case.params.gamma.clone())),
    ],
    ids=["tokens", "type", "alignment", "alignment of a parameter", "strides", "window", "sinks", "sink logits"],
)
@torch.no_grad()
def test_other_calls_have_other_plans(change, fresh_plans):
    case = make_case(TERRACED, 20)
    case.run("triton")
    case.map(torch.clone).run("triton")
    assert len(fresh_plans) == 1
    other: Case = change(case)
    found = other.run("triton")[0]
    assert len(fresh_plans) == 2
    torch.testing.assert_close(found, other.run("reference")[0], rtol=2e-2, atol=2e-2)  # bfloat16


@torch.no_grad()
def test_repeats_with_other_tensors():
    """From the second call on, with each call's own tensors, memory and parameters."""
    first, second = make_case(TERRACED, 20), make_case(TERRACED, 20).map(lambda x: 0.5 * x)
    for case in (first, second, first):
        torch.testing.assert_close(case.run("triton")[0], case.run("reference")[0], rtol=1e-4, atol=1e-5)
    kept = first.run("triton")[0]
    expected = kept.clone()
    second.run("triton")
    assert torch.equal(kept, expected)


@torch.no_grad()
def test_one_tensor_twice():
    """Keys that are also the values do not make the next call take its values from its keys."""
    case = make_case(TERRACED, 20)
    for one in (replace(case, k=case.v), case):
        torch.testing.assert_close(one.run("triton")[0], one.run("reference")[0], rtol=1e-4, atol=1e-5)


def test_whoever_looks_at_operators_sees_one():
    """Gradients, transforms and modes go through the operator; a plain call does not."""

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            names.append(str(function))
            return function(*arguments, **(options or {}))

    case = make_case(TERRACED, 20)
    names: list[str] = []
    with torch.no_grad(), Names():
        y = case.run("triton")[0]
    assert "lolcats.hybrid_attention.default" in names
    with torch.no_grad():
        assert torch.equal(case.run("triton")[0], y)
    assert not eager.is_eager([torch.empty(1, device="meta").as_subclass(type("Other", (Tensor,), {}))])
    assert eager.is_eager([case.q, None, torch.nn.Parameter(case.k)])
    assert torch.func.vmap(lambda x: torch.tensor(eager.is_eager([x])))(torch.zeros(2, device=DEVICE)).sum() == 0
    leaf = case.map(lambda x: x.detach().requires_grad_())
    assert leaf.run("triton")[0].grad_fn is not None
