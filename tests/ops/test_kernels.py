"""The Triton kernels against `reference` in float64: on the GPU if there is one, else through the interpreter."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from kernel_kit import (
    DEVICE,
    GPU,
    TOLERANCE,
    Case,
    check,
    faithful_interpreter,
    make_case,
    on_gpu,
    poisoned_memory,
    results,
)
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops import HybridParams, hybrid_attention, output_mse
from lolcats.ops.hybrid_attention.kernels import op as triton_op
from lolcats.ops.hybrid_attention.kernels.forward import scan_chunks
from lolcats.ops.hybrid_attention.kernels.support import supports

__all__ = ["faithful_interpreter", "poisoned_memory"]  # fixtures of all tests here

SPECS = {
    "terraced-64": AttentionConfig("terraced", 64),
    "terraced-16": AttentionConfig("terraced", 16),
    "terraced-48-three-blocks": AttentionConfig("terraced", 48, window_blocks=3),
    "terraced-128-one-block": AttentionConfig("terraced", 128, window_blocks=1),
    "sliding-64": AttentionConfig("sliding", 64),
    "sliding-20-sinks-3": AttentionConfig("sliding", 20, sinks=3),
    "terraced-16-t2r-sinks-40": AttentionConfig("terraced", 16, sinks=40, feature_map="t2r"),
    "sliding-70-elu": AttentionConfig("sliding", 70, feature_map="elu"),
    "terraced-32-exp": AttentionConfig("terraced", 32, feature_map="exp"),
    "linear": AttentionConfig("sliding", 0),
    "terraced-0": AttentionConfig("terraced", 0),
    "linear-exp-sinks-2": AttentionConfig("sliding", 0, sinks=2, feature_map="exp"),
    "terraced-8-no-linear": AttentionConfig("terraced", 8, feature_map=None),
    "sliding-24-no-linear-sinks-5": AttentionConfig("sliding", 24, sinks=5, feature_map=None),
    "terraced-64-sinks-1": AttentionConfig("terraced", 64, sinks=1),
}


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("name", ["terraced-64", "sliding-20-sinks-3"])
def test_lengths(name, tokens):
    check(make_case(SPECS[name], tokens), return_state=True)


OFTEN = (
    "linear-exp-sinks-2",
    "sliding-20-sinks-3",
    "terraced-16",
    "terraced-64",
    "terraced-64-sinks-1",
)  # in other tests


@pytest.mark.parametrize("name", [on_gpu(name) if name in OFTEN else name for name in sorted(SPECS)])
def test_specs(name):
    """Longer than two windows, so that all parts are there; every other one with a state per query head."""
    share = ("kv_head", "query_head")[sorted(SPECS).index(name) % 2]
    check(make_case(SPECS[name], 200 if GPU else 150, share_state=share), return_state=True)


@pytest.mark.parametrize("name", [on_gpu("terraced-64"), on_gpu("sliding-20-sinks-3"), "linear", "terraced-64-sinks-1"])
def test_bfloat16(name):
    check(make_case(SPECS[name], 200, dtype=torch.bfloat16, head_dim=32, columns=16), return_state=True)


@pytest.mark.parametrize(
    ("name", "tokens", "columns"), [("terraced-64-sinks-1", 170, 128), on_gpu("sliding-20-sinks-3", 200, 32)]
)
def test_gradient_of_gamma(name, tokens, columns):
    """It sums dy . (v - y) over all rows and keys, of which little is left; with the rounding of y the errors here
    would be 7.0e-3 and 8.8e-3."""
    check(make_case(SPECS[name], tokens, dtype=torch.bfloat16, head_dim=32, columns=columns))


@pytest.mark.skipif(not GPU, reason="slow through the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("head_dim", "columns"), [(64, 32), (80, 40), (96, 128), (128, 64), (256, 128)])
@pytest.mark.parametrize("name", ["terraced-64", "sliding-20-sinks-3", "terraced-0", "terraced-64-sinks-1"])
def test_head_dims(name, head_dim, columns, dtype):
    if dtype == torch.float32 and head_dim > 128:
        pytest.skip("float32 rows this wide have no kernel")
    case = make_case(SPECS[name], 500, batch=2, heads=6, kv_heads=2, head_dim=head_dim, columns=columns, dtype=dtype)
    check(case, return_state=True)


@pytest.mark.parametrize("share_state", [on_gpu("kv_head"), "query_head"])
def test_groups(share_state):
    """Three query heads for each of two key/value heads; sizes that are no powers of two."""
    case = make_case(SPECS["terraced-16"], 100, heads=6, kv_heads=2, head_dim=20, columns=10, share_state=share_state)
    check(case, return_state=True)


@pytest.mark.parametrize("name", [on_gpu("terraced-64"), "sliding-20-sinks-3"])
def test_padding(name):
    """A full row, a left-padded one, and one without any token."""
    mask = torch.ones(3, 140, dtype=torch.bool, device=DEVICE)
    mask[1, :70] = False
    mask[2] = False
    check(make_case(SPECS[name], 140, batch=3), mask=mask, return_state=True)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_leaves_out_the_own_entry(reverse):
    """Features over a clamped denominator are 1e12: a sum less the own entry would lose all before it."""
    operands = triton_op._operands(*arguments(make_case(SPECS["linear"], 640))[:-1])
    assert operands.chunks == 10
    S = torch.randn(1, 1, 10, operands.shape.F, operands.shape.D, device=DEVICE)
    z = torch.rand(1, 1, 10, operands.shape.F, device=DEVICE)
    S[:, :, 4, ::2], z[:, :, 4, ::2] = 1e12, 1e12
    right_S, right_z = (x.double().clone() for x in (S, z))
    right_S, right_z = (x.flip(2).cumsum(2).flip(2) - x if reverse else x.cumsum(2) - x for x in (right_S, right_z))
    scan_chunks(operands, S, z, None, None, reverse=reverse)
    torch.testing.assert_close((S.double(), z.double()), (right_S, right_z), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("window", ["terraced", "sliding"])
def test_stored_columns_hold_every_window(window):
    """The chunks from the first key that a tile's window can hold to the tile's own, and not one more."""
    case = make_case(SPECS["terraced-16"], 4)
    sizes = [1, 3, 16, 48, 63, 64, 65, 96, 128, 200]
    for size, blocks in itertools.product(sizes, [1, 2, 3] if window == "terraced" else [1]):
        spec = AttentionConfig(window, size, window_blocks=blocks)
        operands = triton_op._operands(*arguments(replace(case, spec=spec))[:-1])
        first = torch.arange(0, 64 * 300, 64)
        chunks = (first - spec.window_start(first).div(64, rounding_mode="floor") * 64).max() // 64 + 1
        assert 64 * chunks == operands.shape.WINDOW


def test_segments_of_output_mse():
    """Documents of different lengths are several launches, one sum."""
    ids = torch.cat([torch.zeros(1, 130, dtype=torch.int64), torch.arange(130)[None] // 5]).to(DEVICE)
    case = make_case(SPECS["terraced-16"], 130, batch=2)
    target = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(5)).to(case.q)
    losses = [
        output_mse(case.q, case.k, case.v, target, case.spec, case.params, segment_ids=ids, backend=backend)
        for backend in ("triton", "reference")
    ]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-6)


def test_segments():
    ids = torch.tensor([[0] * 70 + [1] * 5 + [-1] * 5 + [3] * 20], device=DEVICE)
    check(make_case(SPECS["terraced-16"], 100), segment_ids=ids)


@pytest.mark.parametrize("name", ["terraced-64", "sliding-20-sinks-3", on_gpu("linear-exp-sinks-2")])
def test_state_goes_on(name):
    """From states after 71 and 150 tokens, neither at the end of a block."""
    case = make_case(SPECS[name], 230, batch=2)
    mask = torch.ones(2, 150, dtype=torch.bool, device=DEVICE)
    mask[1, :79] = False
    before = case.part(0, 150)
    _, state = hybrid_attention(
        before.q, before.k, before.v, case.spec, case.params, mask=mask, return_state=True, backend="reference"
    )
    check(case.part(150, None), state=state, return_state=True)


def test_only_feature_maps_learn():
    """Without gradients of q, k, v the others are the same; on a GPU up to the order of sums."""
    case = make_case(SPECS["sliding-20-sinks-3"], 130)
    everything = results(case, "triton", None, {})
    learned = [x.clone().requires_grad_() for x in case.params if x is not None]
    names = [name for name, x in case.params._asdict().items() if x is not None]
    params = HybridParams(**dict(zip(names, learned, strict=True)))
    y, _ = hybrid_attention(case.q, case.k, case.v, case.spec, params, backend="triton")
    generator = torch.Generator().manual_seed(1)
    incoming = torch.randn(y.shape, generator=generator).to(torch.bfloat16).to(y)
    for name, gradient in zip(names, torch.autograd.grad(y, learned, incoming), strict=True):
        torch.testing.assert_close(gradient, everything[f"gradient of {name}"], rtol=1e-5, atol=1e-5 if GPU else 0.0)


def error_and_gradients(case: Case, target: Tensor, backend: str, mask: Tensor | None = None) -> list[Tensor]:
    """`output_mse` and the gradients of thrice of it for all parameters."""
    params = HybridParams(*(None if x is None else x.detach().clone().requires_grad_() for x in case.params))
    loss = output_mse(case.q, case.k, case.v, target, case.spec, params, mask=mask, backend=backend)
    leaves = [x for x in params if x is not None]
    gradients = torch.autograd.grad(3.0 * loss, leaves, allow_unused=True)
    return [loss, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True))]


@pytest.mark.parametrize(
    ("name", "padded"),
    [("terraced-64", True), ("sliding-20-sinks-3", True), ("terraced-8-no-linear", False)]
    + [on_gpu(name, True) for name in ("linear-exp-sinks-2", "terraced-8-no-linear")]
    + [on_gpu(name, False) for name in ("terraced-64", "sliding-20-sinks-3", "linear-exp-sinks-2")],
)
def test_output_mse(name, padded):
    """The error inside the kernels is that of the written outputs, and so are the gradients; padding is left out."""
    case = make_case(SPECS[name], 150, batch=2)
    mask = torch.ones(2, 150, dtype=torch.bool, device=DEVICE)
    mask[1, :50] = not padded
    target = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(5)).to(case.q)
    mask = mask if padded else None
    expected = error_and_gradients(case.map(Tensor.double), target.double(), "reference", mask)
    for right, found in zip(expected, error_and_gradients(case, target, "triton", mask), strict=True):
        torch.testing.assert_close(found.double(), right.detach(), rtol=1e-4, atol=1e-6)
    wrong = error_and_gradients(case, 1.01 * target, "triton", mask)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(wrong[0].double(), expected[0].detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [on_gpu("terraced-64"), "terraced-64-sinks-1", on_gpu("sliding-20-sinks-3")])
def test_bfloat16_as_trained(name):
    """A small model's head: outputs without autograd, and the error inside the kernels with its gradients."""
    sizes = {"heads": 3, "kv_heads": 1, "head_dim": 64, "columns": 32}
    case = make_case(SPECS[name], 200, dtype=torch.bfloat16, **sizes)
    exact = case.map(Tensor.double)
    target = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(5)).to(case.q)
    with torch.no_grad():
        y, y_exact = (
            hybrid_attention(x.q, x.k, x.v, x.spec, x.params, backend=backend)[0]
            for x, backend in ((case, "triton"), (exact, "reference"))
        )
    names = ["output", "loss", *(f"gradient of {name}" for name, x in case.params._asdict().items() if x is not None)]
    found = [y, *error_and_gradients(case, target, "triton")]
    expected = [y_exact, *error_and_gradients(exact, target.double(), "reference")]
    for name, left, right in zip(names, found, expected, strict=True):
        error = (left.double() - right).norm() / right.norm()
        # written so that NaN fails
        assert error <= TOLERANCE[case.q.dtype], f"{name}: error {error:.1e}"


def test_without_autograd():
    """Nothing is saved, nothing else changes; rows in any memory layout."""
    case = make_case(SPECS["sliding-20-sinks-3"], 100)
    with torch.no_grad():
        y, _ = hybrid_attention(case.q, case.k, case.v, case.spec, case.params, backend="triton")
        dense, _ = hybrid_attention(
            *(x.contiguous() for x in (case.q, case.k, case.v)), case.spec, case.params, backend="triton"
        )
    assert torch.equal(y, results(case, "triton", None, {})["output"])
    assert torch.equal(y, dense)


def arguments(case: Case) -> tuple:
    spec = case.spec
    return (
        *(case.q, case.k, case.v, *case.params[:5]),
        *[None] * 8,
        *(
            0,
            spec.window,
            spec.window_size,
            spec.window_blocks,
            spec.sinks,
            spec.feature_map,
            spec.linear_length_cap,
            0.25,
            True,
        ),
    )


def test_registration(monkeypatch):
    """Schema, shapes without data, autograd and tracing, as torch.library checks them."""
    for name in ("empty", "empty_like"):  # tracing makes tensors without data, which cannot be poisoned
        monkeypatch.setattr(torch, name, getattr(torch, name).unpoisoned)
    case = make_case(SPECS["terraced-16"], 20).map(lambda x: x.detach().requires_grad_())
    torch.library.opcheck(triton_op.hybrid_attention_op, arguments(case))


def test_compiles():
    """torch.compile keeps the operator whole, forward and backward."""
    case = make_case(SPECS["terraced-16"], 40)
    q = case.q.clone().requires_grad_()

    def loss(q):
        return hybrid_attention(q, case.k, case.v, case.spec, case.params, backend="triton")[0].square().sum()

    expected = torch.autograd.grad(loss(q), q)[0]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert torch.equal(torch.autograd.grad(compiled(q), q)[0], expected)


def wrong_window(case, monkeypatch):
    return replace(case, spec=replace(case.spec, window_size=case.spec.window_size + 1))


def wrong_sinks(case, monkeypatch):
    return replace(case, spec=replace(case.spec, sinks=case.spec.sinks - 1))


def wrong_gamma(case, monkeypatch):
    return replace(case, params=case.params._replace(gamma=torch.ones_like(case.params.gamma)))


def wrong_maximum(case, monkeypatch):
    """The gradient through c_n goes to the first key instead of the maximal one."""
    right = triton_op.attend

    def attend(*positional, **options):
        out = right(*positional, **options)
        return out._replace(arg=torch.zeros_like(out.arg))

    monkeypatch.setattr(triton_op, "attend", attend)
    return case


def wrong_chunk(case, monkeypatch):
    """Every tile of queries reads the state before the previous chunk."""
    right = triton_op.chunk_states

    def chunk_states(operands):
        states = right(operands)
        return states._replace(prefix_S=states.prefix_S.roll(1, 2), prefix_z=states.prefix_z.roll(1, 2))

    monkeypatch.setattr(triton_op, "chunk_states", chunk_states)
    return case


def wrong_denominator(case, monkeypatch):
    """The window alone is normalised."""
    right = triton_op.chunk_states

    def chunk_states(operands):
        states = right(operands)
        return states._replace(prefix_z=torch.zeros_like(states.prefix_z))

    monkeypatch.setattr(triton_op, "chunk_states", chunk_states)
    return case


def wrong_floor(case, monkeypatch):
    """The state lacks the oldest sum."""
    right = triton_op.chunk_states

    def chunk_states(operands):
        states = right(operands)
        return states._replace(final_S=states.final_S - states.prefix_S[:, :, 1].float())

    monkeypatch.setattr(triton_op, "chunk_states", chunk_states)
    return case


@pytest.mark.parametrize(
    "fault",
    [wrong_window, wrong_sinks, wrong_gamma, wrong_maximum, wrong_chunk, wrong_denominator, wrong_floor],
)
def test_faults_are_found(fault, monkeypatch):
    case = make_case(SPECS["sliding-20-sinks-3"], 135)
    with pytest.raises(AssertionError, match="relative RMS error"):
        check(case, wrong=fault(case, monkeypatch), return_state=True)


def test_swapped_heads_are_found():
    """Query heads go to their own group's keys, in order."""
    case = make_case(SPECS["sliding-20-sinks-3"], 30, heads=4, kv_heads=2)
    with pytest.raises(AssertionError, match="relative RMS error"):
        check(case, wrong=replace(case, k=case.k.flip(1), v=case.v.flip(1)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim": 8}, "head_dim is 8"),
        ({"columns": 200}, "feature_dim is 200"),
        ({"spec": AttentionConfig("sliding", 8, sinks=65)}, "65 sinks"),
        (
            {"spec": AttentionConfig("sliding", 8, feature_map="hedgehog_bias")},
            "feature map 'hedgehog_bias' has no kernel",
        ),
    ],
)
def test_says_why_not(change, reason):
    case = make_case(**({"spec": SPECS["terraced-16"], "tokens": 4} | change))
    assert reason in (supports(case.q, case.k, case.v, case.spec, case.params) or "")
    with pytest.raises(ValueError, match=reason):
        hybrid_attention(case.q, case.k, case.v, case.spec, case.params, backend="triton")


def test_softcap_and_sink_logits_have_no_kernel():
    case = make_case(SPECS["terraced-16"], 4)
    assert supports(case.q, case.k, case.v, case.spec, case.params) is None
    assert "soft-capped" in (supports(case.q, case.k, case.v, case.spec, case.params, softcap=30.0) or "")
    logits = case.params._replace(sink_logits=torch.zeros(2, device=DEVICE))
    assert "Sink logits" in (supports(case.q, case.k, case.v, case.spec, logits) or "")
