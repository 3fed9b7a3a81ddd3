"""The outputs' kernel for short windows and the states' kernel for many sequences, which take one size and type alone:
which calls they take, and those against `reference` in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_kit import (
    DEVICE,
    Case,
    assert_near,
    check,
    errors,
    exact,
    layout,
    make_case,
    name_of,
    needs_gpu,
    state_after,
)

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.kernels import forward, forward_states, launch

pytestmark = pytest.mark.usefixtures("fresh_plans")

TAKEN = {
    "terraced-64": AttentionConfig("terraced", 64),
    "sliding-20": AttentionConfig("sliding", 20),
    "sliding-64": AttentionConfig("sliding", 64),
    "sliding-65": AttentionConfig("sliding", 65),
}
LEFT = {
    "sinks": AttentionConfig("terraced", 64, sinks=2),
    "sliding-sinks": AttentionConfig("sliding", 64, sinks=2),
    "three-blocks": AttentionConfig("terraced", 64, 3),
    "one-block": AttentionConfig("terraced", 64, 1),
    "longer-blocks": AttentionConfig("terraced", 128, 1),
    "shorter-blocks": AttentionConfig("terraced", 32),
    "sliding-66": AttentionConfig("sliding", 66),
    "cap": AttentionConfig("terraced", 64, linear_length_cap=40),
    "t2r": AttentionConfig("terraced", 64, feature_map="t2r"),
    "no-linear": AttentionConfig("terraced", 64, feature_map=None),
}


def make(config: AttentionConfig, tokens: int, **sizes: Any) -> Case:
    return make_case(config, tokens, **({"head_dim": 128, "columns": 64, "dtype": torch.bfloat16} | sizes))


@pytest.fixture
def walks(monkeypatch):
    """Of one sequence, too."""
    monkeypatch.setattr(forward_states, "_WALKED_ROWS", 1)


CASES = [
    ("terraced-64", "200", None, {}),
    ("terraced-64", "1", None, {"heads": 8, "kv_heads": 2}),  # the gradient of q is exactly zero
    ("terraced-64", "left", (71, 20, 3), {"share": "query_head"}),
    pytest.param("terraced-64", "borders", None, {}, marks=pytest.mark.slow),
    ("sliding-20", "70", (71,), {}),
    pytest.param("sliding-64", "documents", None, {}, marks=pytest.mark.slow),
    ("sliding-65", "left", None, {}),
]


@pytest.mark.parametrize(("name", "how", "before", "sizes"), CASES, ids=lambda x: x if isinstance(x, str) else None)
def test_outputs_states_and_gradients(name, how, before, sizes, kernels):
    batch, tokens, options, padding = layout(how)
    case = make(TAKEN[name], tokens, batch=batch, **sizes)
    if before is None:
        options["wrong"] = case.with_nan_where(padding)
    else:
        options["state"] = state_after(case, before)
    check(case, **options)
    assert "direct_kernel" in kernels
    assert "output_kernel" not in kernels


@needs_gpu
@pytest.mark.parametrize("how", ["1", "63", "64", "65", "borders", "documents", "left", "holes"])
@pytest.mark.parametrize("name", sorted(TAKEN))
def test_every_layout(name, how, kernels, walks):
    batch, tokens, options, padding = layout(how)
    case = make(TAKEN[name], tokens, batch=batch, heads=32, kv_heads=8)
    check(case, wrong=case.with_nan_where(padding), **options)
    before = {"left": (71, 20, 3), "holes": (71, 20), "borders": (71, 0, 20, 5, 79)}.get(how)
    if before is not None:
        check(case, state=state_after(case, before), **options)
    assert "direct_kernel" in kernels


@pytest.mark.parametrize("name", ["sliding-20", pytest.param("terraced-64", marks=pytest.mark.slow)])
def test_output_mse(name, kernels):
    batch, tokens, options, padding = layout("left")
    options.pop("return_state")
    case = make(TAKEN[name], tokens, batch=batch)
    target = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(5)).to(case.q)
    expected = errors(exact(case), "reference", target.double(), **options)
    given = target.masked_fill(padding[:, None, :, None], float("nan"))
    assert_near(errors(case.with_nan_where(padding), "triton", given, **options), expected, torch.bfloat16)
    assert "direct_kernel" in kernels


@pytest.mark.parametrize("gamma", [[-0.1, 0.0], [0.02, 3.0]])
def test_any_gamma(gamma, kernels):
    """After so many tokens that the denominator stays positive."""
    case = make(TAKEN["terraced-64"], 70)
    case.params = case.params._replace(gamma=torch.tensor(gamma, device=DEVICE))
    check(case, state=state_after(case, (200,)), return_state=True)
    assert "direct_kernel" in kernels


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(LEFT))
def test_leaves_other_settings(name, kernels, walks):
    case = make(LEFT[name], 130 if "sinks" in name else 70)
    check(case, gradients=False, return_state=True)
    assert "output_kernel" in kernels
    assert "direct_kernel" not in kernels
    assert ("walk_kernel" in kernels) == (name not in ("sinks", "sliding-sinks", "t2r", "no-linear"))


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [{"dtype": torch.float16}, {"head_dim": 64}, {"columns": 32}, {"sink_logits": True}, {"softcap": 2.0}],
    ids=lambda change: next(iter(change)),
)
def test_leaves_other_calls(change, kernels):
    softcap = change.pop("softcap", None)
    check(make(TAKEN["terraced-64"], 20, **change), gradients=False, softcap=softcap)
    assert "output_kernel" in kernels
    assert "direct_kernel" not in kernels


@pytest.mark.parametrize(
    ("name", "how", "before"),
    [
        ("terraced-64", "200", None),
        pytest.param("sliding-20", "left", (71, 20, 3), marks=pytest.mark.slow),
        ("sliding-64", "130", None),
    ],
)
def test_walks(name, how, before, kernels, walks):
    """With gradients, which read the states that it wrote."""
    batch, tokens, options, padding = layout(how)
    case = make(TAKEN[name], tokens, batch=batch)
    state = None if before is None else state_after(case, before)
    check(case, wrong=case.with_nan_where(padding) if state is None else None, state=state, **options)
    assert "walk_kernel" in kernels
    assert "state_kernel" not in kernels


@torch.no_grad()
@pytest.mark.parametrize(("batch", "walked"), [(15, False), (16, True)])
def test_walks_where_there_are_many(batch, walked, kernels, monkeypatch):
    """Which kernels are chosen; through the interpreter so many would be slow to run."""
    monkeypatch.setattr(launch.Plan, "launch", lambda plan, kernel, *_, **__: kernels.append(name_of(kernel)))
    make(TAKEN["terraced-64"], 1, batch=batch, heads=8, kv_heads=8).run("triton")
    assert ("walk_kernel" in kernels) == walked
    assert ("state_kernel" in kernels) != walked


@torch.no_grad()
@pytest.mark.parametrize("name", ["sinks", "longer-blocks", "cap", "t2r"])
def test_what_they_do_not_take_would_be_found(name, monkeypatch):
    monkeypatch.setattr(forward, "is_direct", lambda x: True)
    with pytest.raises(AssertionError, match="output: relative RMS error"):
        check(make(LEFT[name], 190), gradients=False)


@torch.no_grad()
def test_a_walk_over_sinks_would_be_found(monkeypatch):
    monkeypatch.setattr(forward_states, "is_walked", lambda x: True)
    with pytest.raises(AssertionError, match="output: relative RMS error"):
        check(make(LEFT["sinks"], 190), gradients=False)
