"""Kernels of the forward pass beyond a linear_length_cap, in every layout, and what is said of the backward pass.

Single tokens are in `test_step_kernel` and `test_sparse_step_kernel`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_kit import DEVICE, TOLERANCE, Case, check, faithful_interpreter, make_case, on_gpu, poisoned_memory, results
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops import HybridState, hybrid_attention, output_mse
from lolcats.ops.hybrid_attention.kernels import op, support
from lolcats.ops.hybrid_attention.kernels.op import triton_attention
from lolcats.ops.hybrid_attention.kernels.support import supports

__all__ = ["faithful_interpreter", "poisoned_memory"]  # fixtures of all tests here

SPECS = {
    "terraced-16-sinks-3": AttentionConfig("terraced", 16, sinks=3, linear_length_cap=9),
    "terraced-64": AttentionConfig("terraced", 64, linear_length_cap=90),
    "sliding-20": AttentionConfig("sliding", 20, linear_length_cap=30),
    "linear-exp-sinks-2": AttentionConfig("sliding", 0, sinks=2, feature_map="exp", linear_length_cap=9),
}


@torch.no_grad()
def check_forward(case: Case, *, wrong: Case | None = None, state: HybridState | None = None, **options) -> None:
    """As `check`, without gradients. `wrong`: what the kernels get instead."""
    exact = case.map(Tensor.double)
    exact_state = None if state is None else state.map(lambda x: x.double() if x.is_floating_point() else x)
    found: list[dict[str, Tensor]] = []
    for x, before, name in ((wrong or case, state, "triton"), (exact, exact_state, "reference")):
        y, after = hybrid_attention(x.q, x.k, x.v, x.spec, x.params, state=before, backend=name, **options)
        found.append({"output": y} | ({} if after is None else after.tensors()))
    for name, right in found[1].items():
        error = (found[0][name].double() - right).norm() / right.double().norm().clamp_min(1e-2)
        assert error <= TOLERANCE[case.q.dtype], f"{name}: relative RMS error {error:.1e}"  # written so that NaN fails


def state_after(case: Case, lengths: list[int]) -> HybridState:
    """Of sequences of `lengths` tokens."""
    tokens = max(lengths)
    before = make_case(case.spec, tokens, batch=len(lengths))
    mask = torch.arange(tokens, device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]
    options: dict[str, Any] = {"mask": mask, "return_state": True, "backend": "reference"}
    state = hybrid_attention(before.q, before.k, before.v, case.spec, case.params, **options)[1]
    assert state is not None
    return state


def layout(name: str) -> tuple[int, int, dict[str, Any]]:
    """Batch, tokens and options of `hybrid_attention`."""
    row = torch.arange(100, device=DEVICE)
    if name == "documents":
        return 1, 100, {"segment_ids": ((row >= 40).long() - 2 * (row >= 95).long())[None]}
    if name == "borders":
        return 1, 100, {"cu_seqlens": torch.tensor([0, 30, 30, 97], device=DEVICE), "return_state": True}
    if name == "left":
        return 2, 100, {"mask": torch.stack([row >= 0, row >= 35]), "return_state": True}
    if name == "holes":
        return 2, 100, {"mask": torch.stack([row >= 0, row % 3 != 1]), "return_state": True}
    return 2, 130, {"return_state": True}


@pytest.mark.parametrize("how", ["whole", "left", "holes", "documents", "borders"])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_layouts(name, how):
    batch, tokens, options = layout(how)
    check_forward(make_case(SPECS[name], tokens, batch=batch), **options)


@pytest.mark.parametrize("how", ["whole", "left", "borders"])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_states_go_on(name, how):
    batch, tokens, options = layout(how)
    case = make_case(SPECS[name], tokens, batch=batch)
    lengths = [71, 0, 20] if how == "borders" else [71, 20]
    check_forward(case, state=state_after(case, lengths), **options)


def test_bfloat16():
    check_forward(make_case(SPECS["terraced-16-sinks-3"], 130, dtype=torch.bfloat16, head_dim=32, columns=16))


@pytest.mark.parametrize("how", ["whole", "borders"])
def test_catches_a_length_cap_counted_from_the_grid(monkeypatch, how):
    """Entries of the grid taken for positions: right where the sequences start, wrong where they go on."""
    right = op._arguments

    def arguments(*given):
        *rest, base, layout, sequences = given
        return right(*rest, None if base is None else torch.zeros_like(base), layout, sequences)

    monkeypatch.setattr(op, "_arguments", arguments)
    batch, tokens, options = layout(how)
    case = make_case(SPECS["sliding-20"], tokens, batch=batch)
    check_forward(case, **options)
    with pytest.raises(AssertionError, match="output: relative RMS error"):
        check_forward(case, state=state_after(case, [71, 0, 20] if how == "borders" else [71, 20]), **options)


@pytest.mark.parametrize("name", sorted(SPECS))
def test_a_wrong_horizon_is_found(name):
    case = make_case(SPECS[name], 130)
    later = replace(case.spec, linear_length_cap=case.spec.linear_length_cap + 1)
    with pytest.raises(AssertionError, match="output: relative RMS error"):
        check_forward(case, wrong=replace(case, spec=later))


@torch.no_grad()
def test_output_mse():
    case = make_case(SPECS["terraced-16-sinks-3"], 100, batch=2)
    target = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(5)).to(case.q)
    mask = layout("left")[2]["mask"]
    errors = [
        output_mse(x.q, x.k, x.v, target.to(x.q), spec, x.params, mask=mask, backend=name)
        for x, name, spec in (
            (case, "triton", case.spec),
            (case.map(Tensor.double), "reference", case.spec),
            (case, "triton", replace(case.spec, linear_length_cap=0)),
        )
    ]
    torch.testing.assert_close(errors[0].double(), errors[1], rtol=1e-5, atol=0)
    assert (errors[2] - errors[0]).abs() > 1e-3


@pytest.mark.parametrize("how", [on_gpu("whole"), "documents"])
def test_within_it_kernels_have_gradients(how):
    """The same numbers as without: the kernels get no linear_length_cap that no token passes."""
    batch, tokens, options = layout(how)
    case = make_case(AttentionConfig("terraced", 16, sinks=3, linear_length_cap=tokens), tokens, batch=batch)
    check(case, **options)
    without = results(replace(case, spec=replace(case.spec, linear_length_cap=0)), "triton", None, options)
    for name, x in results(case, "triton", None, options).items():
        assert torch.equal(x, without[name]), name


def test_says_when_gradients_have_no_kernel():
    case = make_case(AttentionConfig("terraced", 16, linear_length_cap=30), 30)

    def reason(case: Case, **options) -> str:
        return supports(case.q, case.k, case.v, case.spec, case.params, **options) or ""

    with_gradients = case.map(lambda x: x.clone().requires_grad_())
    assert reason(with_gradients) == ""
    longer = make_case(case.spec, 31)
    assert reason(longer) == ""
    state = state_after(case, [1])
    for tensor in ("q", "v", "gamma", "k_weight"):
        wanted = make_case(case.spec, 31)
        wanted.tensors()[tensor].requires_grad_()
        assert "beyond the linear_length_cap of 30" in reason(wanted), tensor
        with torch.no_grad():
            assert reason(wanted) == "", tensor
    assert "beyond the linear_length_cap" in reason(with_gradients, state=state)
    assert reason(case, state=state) == ""
    assert "beyond the linear_length_cap" in reason(case, state=replace(state, S=state.S.clone().requires_grad_()))
    with pytest.raises(ValueError, match="beyond the linear_length_cap of 30 tokens have no kernel"):
        check(longer)


@pytest.mark.parametrize("loss", ["output", "error"])
def test_gradients_beyond_it_fall_back(monkeypatch, loss):
    """`auto` where kernels could run: values and gradients are those of the reference."""
    monkeypatch.setattr(op, "triton_attention", None)
    monkeypatch.setattr(op, "triton_squared_error", None)
    monkeypatch.setattr(support, "_any_device", lambda x: None)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: True))
    case = make_case(SPECS["terraced-16-sinks-3"], 70)

    def gradients(case: Case, name: str) -> list[Tensor]:
        case = case.map(lambda x: x.detach().clone())
        leaves = [x.requires_grad_() for x in case.params if x is not None]
        if loss == "error":
            value = output_mse(case.q, case.k, case.v, case.q.roll(1, 2), case.spec, case.params, backend=name)
        else:
            value = hybrid_attention(case.q, case.k, case.v, case.spec, case.params, backend=name)[0].square().mean()
        return [value, *torch.autograd.grad(value, leaves)]

    expected = gradients(case.map(Tensor.double), "reference")
    for found, right in zip(gradients(case, "auto"), expected, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-6)
    within = replace(case, spec=replace(case.spec, linear_length_cap=70))
    with pytest.raises(TypeError, match="not callable"):  # where the kernels would have run
        gradients(within, "auto")


def test_the_backward_pass_refuses_a_length_cap():
    """Nobody gets gradients that leave it out."""
    case = make_case(SPECS["terraced-16-sinks-3"], 20).map(lambda x: x.requires_grad_())
    y, _ = triton_attention(case.q, case.k, case.v, case.spec, case.params, scale=0.25, state=None, fresh=True)
    with pytest.raises(AssertionError):
        y.sum().backward()
