"""Ragged batches in the Triton kernels: every sequence gets what it gets alone, and padding gives and takes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_kit import DEVICE, GPU, Case, check, faithful_interpreter, make_case, on_gpu, poisoned_memory, results
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops import HybridParams, hybrid_attention, output_mse
from lolcats.ops.hybrid_attention.kernels import op as triton_op
from lolcats.ops.hybrid_attention.kernels import segments

__all__ = ["faithful_interpreter", "poisoned_memory"]  # fixtures of all tests here

SPECS = {
    "terraced-64": AttentionConfig("terraced", 64),
    "terraced-16-sinks-5": AttentionConfig("terraced", 16, sinks=5),
    "sliding-20-sinks-3": AttentionConfig("sliding", 20, sinks=3),
    "linear-exp": AttentionConfig("sliding", 0, feature_map="exp"),
    "terraced-8-no-linear": AttentionConfig("terraced", 8, feature_map=None),
}
LENGTHS = [1, 63, 64, 65, 0, 130, 3]


def borders(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


def poisoned(case: Case, real_BT: Tensor) -> Case:
    """The case with NaN in all padding."""

    def poison(x: Tensor) -> Tensor:
        return x.masked_fill(~real_BT[:, None, :, None], float("nan"))

    return replace(case, q=poison(case.q), k=poison(case.k), v=poison(case.v))


@pytest.mark.parametrize("name", [on_gpu("terraced-64"), "sliding-20-sinks-3"])
def test_lengths(name):
    check(make_case(SPECS[name], sum(LENGTHS)), cu_seqlens=borders(LENGTHS), return_state=True)


@pytest.mark.parametrize(
    ("name", "share_state"),
    [("terraced-16-sinks-5", "query_head"), ("linear-exp", "kv_head"), ("terraced-8-no-linear", "kv_head")],
)
def test_groups(name, share_state):
    """Two query heads for each of two key/value heads."""
    case = make_case(SPECS[name], 44, heads=4, kv_heads=2, share_state=share_state)
    check(case, cu_seqlens=borders([4, 40]), return_state=True)


@pytest.mark.skipif(not GPU, reason="slow through the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("head_dim", "columns"), [(64, 32), (80, 40), (128, 64), (256, 128)])
@pytest.mark.parametrize("name", ["terraced-64", "sliding-20-sinks-3"])
def test_head_dims(name, head_dim, columns, dtype):
    if dtype == torch.float32 and head_dim > 128:
        pytest.skip("float32 rows this wide have no kernel")
    lengths = [*LENGTHS, 500, 1000]
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": head_dim, "columns": columns, "dtype": dtype}
    check(make_case(SPECS[name], sum(lengths), **sizes), cu_seqlens=borders(lengths), return_state=True)


def test_one_sequence_is_a_dense_batch():
    case = make_case(SPECS["terraced-16-sinks-5"], 70)
    expected = results(case, "triton", None, {"return_state": True})
    found = results(case, "triton", None, {"return_state": True, "cu_seqlens": borders([70])})
    for name, right in expected.items():
        torch.testing.assert_close(found[name], right, rtol=1e-5, atol=1e-5 if GPU else 1e-6, msg=name)


@pytest.mark.parametrize("name", ["terraced-64", on_gpu("sliding-20-sinks-3")])
def test_states_go_on(name):
    """Sequences at four positions, one of which gets no token, and padding behind them."""
    before = make_case(SPECS[name], 170)
    _, state = before_state = hybrid_attention(
        *(before.q, before.k, before.v, before.spec, before.params),
        cu_seqlens=borders([71, 0, 20, 79]),
        return_state=True,
        backend="reference",
    )
    assert before_state is not None
    case = make_case(SPECS[name], 90)
    real_T = torch.arange(90, device=DEVICE) < 85
    options = {"state": state, "cu_seqlens": borders([5, 66, 0, 14]), "return_state": True}
    check(case, wrong=poisoned(case, real_T[None]), **options)


def test_padding_behind_the_sequences():
    case = make_case(SPECS["terraced-16-sinks-5"], 100)
    real_T = torch.arange(100, device=DEVICE) < 31
    check(case, wrong=poisoned(case, real_T[None]), cu_seqlens=borders([2, 29]), return_state=True)


def test_documents_in_several_rows():
    """Padding between documents and at both ends of rows; an id that comes again begins another document."""
    rows = [[0] * 66 + [1] * 5 + [-1] * 5 + [3] * 4, [-1] * 20 + [7] * 50 + [8] * 2 + [7] * 2 + [-2] * 6]
    ids = torch.tensor(rows, device=DEVICE)
    case = make_case(SPECS["terraced-16-sinks-5"], 80, batch=2)
    check(case, wrong=poisoned(case, ids >= 0), segment_ids=ids)


@pytest.mark.parametrize("side", ["left", on_gpu("right")])
def test_padded_rows(side):
    """A full row, a padded one, and one without any token."""
    mask = torch.ones(3, 70, dtype=torch.bool, device=DEVICE)
    mask[1, :30] = False
    mask[2] = False
    if side == "right":
        mask = mask.flip(1)
    case = make_case(SPECS["sliding-20-sinks-3"], 70, batch=3)
    check(case, wrong=poisoned(case, mask), mask=mask, return_state=True)


def test_padding_between_the_tokens_of_a_row():
    """Such tokens do not lie one behind the other: they are gathered."""
    mask = torch.ones(2, 80, dtype=torch.bool, device=DEVICE)
    mask[1, 20:30] = False
    assert segments.from_mask(mask) is None
    case = make_case(SPECS["terraced-16-sinks-5"], 80, batch=2)
    check(case, wrong=poisoned(case, mask), mask=mask, return_state=True)


def test_output_mse():
    """Loss and gradients with documents and NaN in the padding."""
    ids = torch.tensor([[-1] * 10 + [0] * 30 + [1] * 30, [5] * 3 + [-1] * 40 + [6] * 27], device=DEVICE)
    case = make_case(SPECS["terraced-16-sinks-5"], 70, batch=2)
    target = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(5)).to(case.q)

    def loss_and_gradients(case: Case, target: Tensor, backend: str) -> list[Tensor]:
        params = HybridParams(*(None if x is None else x.detach().clone().requires_grad_() for x in case.params))
        loss = output_mse(case.q, case.k, case.v, target, case.spec, params, segment_ids=ids, backend=backend)
        return [loss, *torch.autograd.grad(loss, [x for x in params if x is not None])]

    expected = loss_and_gradients(case.map(Tensor.double), target.double(), "reference")
    padding = (ids < 0)[:, None, :, None]
    found = loss_and_gradients(poisoned(case, ids >= 0), target.masked_fill(padding, float("nan")), "triton")
    for right, value in zip(expected, found, strict=True):
        torch.testing.assert_close(value.double(), right.detach(), rtol=1e-4, atol=1e-6)


def border_forgotten(monkeypatch) -> None:
    """Two sequences are taken for one."""
    right = segments.of_borders
    monkeypatch.setattr(segments, "of_borders", lambda cu, tokens: right(cu[[0, 1, 3]], tokens))


def border_shifted(monkeypatch) -> None:
    """The last token of the first sequence is in the windows of the second."""
    right = segments.of_borders
    shift = torch.tensor([0, -1, 0, 0], device=DEVICE, dtype=torch.int32)
    monkeypatch.setattr(segments, "of_borders", lambda cu, tokens: right(cu + shift, tokens))


def state_across_a_border(monkeypatch) -> None:
    """Each sequence begins with what the one before it left."""
    right = triton_op.chunk_states

    def chunk_states(x):
        states = right(x)
        prefix_S = states.prefix_S.clone()
        first = int(x.table[1, 4])
        prefix_S[:, :, first:] += states.final_S[0, :, None]
        return states._replace(prefix_S=prefix_S)

    monkeypatch.setattr(triton_op, "chunk_states", chunk_states)


def sinks_of_the_first_sequence(monkeypatch) -> None:
    right = triton_op._first_tokens

    def first_tokens(k, v, count, layout):
        return tuple(x[:1].expand_as(x) for x in right(k, v, count, layout))

    monkeypatch.setattr(triton_op, "_first_tokens", first_tokens)


@pytest.mark.parametrize(
    "fault", [border_forgotten, border_shifted, state_across_a_border, sinks_of_the_first_sequence]
)
def test_faults_are_found(fault, monkeypatch):
    case = make_case(SPECS["sliding-20-sinks-3"], 90)
    options = {"cu_seqlens": borders([30, 25, 35]), "return_state": True}
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"output: relative RMS error \d"):
        check(case, **options)


def arguments(case: Case, lengths: list[int]) -> tuple:
    spec = case.spec
    layout = segments.from_borders(borders(lengths), case.q.shape[2])
    static = (spec.window, spec.window_size, spec.window_blocks, spec.sinks, spec.feature_map, spec.linear_length_cap)
    fixed = (len(lengths), *static, 0.25, True)
    return (case.q, case.k, case.v, *case.params[:5], *[None] * 6, layout.table, layout.slots, *fixed)


def test_registration(monkeypatch):
    """Schema, shapes without data, autograd and tracing, as torch.library checks them."""
    for name in ("empty", "empty_like"):  # tracing makes tensors without data, which cannot be poisoned
        monkeypatch.setattr(torch, name, getattr(torch, name).unpoisoned)
    case = make_case(AttentionConfig("terraced", 16), 10, heads=1).map(lambda x: x.detach().requires_grad_())
    torch.library.opcheck(triton_op.hybrid_attention_op, arguments(case, [3, 0, 7]))
    ids = torch.tensor([[1, 1, 2, -1], [0, 0, 0, 0]], device=DEVICE)
    torch.library.opcheck(segments.segments_of_ids_op, (ids,))


@pytest.mark.parametrize("kind", ["cu_seqlens", "segment_ids", "mask"])
def test_compiles(kind):
    """torch.compile makes one graph of it, forward and backward."""
    case = make_case(SPECS["terraced-64"], 20)
    layout = {
        "cu_seqlens": borders([4, 16]),
        "segment_ids": (torch.arange(20, device=DEVICE) // 15)[None],
        "mask": torch.arange(20, device=DEVICE)[None] > 5,
    }[kind]
    q = case.q.clone().requires_grad_()

    def loss(q: Tensor, layout: Tensor) -> Tensor:
        options = {kind: layout, "backend": "triton"}
        return hybrid_attention(q, case.k, case.v, case.spec, case.params, **options)[0].square().sum()

    expected = torch.autograd.grad(loss(q, layout), q)[0]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(q, layout), q)[0], expected, rtol=1e-5, atol=1e-6)
