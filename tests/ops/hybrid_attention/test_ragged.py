"""Padding and packed documents: each sequence gets what it gets alone."""

from __future__ import annotations

import hybrid_wrong
import pytest
import torch
from hybrid_cases import IMPLEMENTATIONS, SPECS, assert_near, assert_states_near, chunked, make_case, reference
from hybrid_checks import check_documents, check_padding, results_and_gradients

from lolcats.ops import HybridState, hybrid_attention
from lolcats.ops.hybrid_attention.ragged import by_length, rows_from_borders, rows_from_mask, rows_from_segments

LENGTHS = torch.tensor([90, 0, 1, 63, 65])  # tokens of each sequence in a batch of 90 columns
DOCUMENTS = [
    [(0, 90)],
    [(0, 5), (1, 64), (2, 21)],
    [(-1, 10), (3, 1), (0, 1), (3, 70), (-1, 8)],  # padding at both ends, an id that comes again
    [(-1, 40), (-2, 50)],  # nothing
    [(7, 30), (-1, 30), (7, 30)],  # padding between two documents of one id
]


def padding_mask(kind: str) -> torch.Tensor:
    column = torch.arange(90)
    if kind == "left":
        return column >= 90 - LENGTHS[:, None]
    if kind == "right":
        return column < LENGTHS[:, None]
    rank = torch.rand(len(LENGTHS), 90, generator=torch.Generator().manual_seed(3)).argsort(dim=1)
    return rank < LENGTHS[:, None]


def many_documents() -> torch.Tensor:
    """One long document and many short ones, some padding between."""
    short = torch.arange(90).expand(4, -1) // torch.tensor([3, 1, 7, 20])[:, None]
    short[2, 14:28] = -1
    return torch.cat([torch.zeros(1, 90, dtype=torch.int64), short])


def segment_ids() -> torch.Tensor:
    return torch.tensor([[i for i, count in row for _ in range(count)] for row in DOCUMENTS])


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("backend", list(IMPLEMENTATIONS))
def test_padded_batch_equals_each_sequence_alone(backend: str, name: str, kind: str) -> None:
    case = make_case(SPECS[name], 90, batch=5, kv_heads=1, repeats=2, head_dim=4)
    check_padding(IMPLEMENTATIONS[backend], case, padding_mask(kind))


@pytest.mark.parametrize("name", ["sliding-70-sinks-3", "terraced-64"])
def test_padded_batch_in_float32(name: str) -> None:
    case = make_case(SPECS[name], 90, batch=5, kv_heads=1, repeats=3, dtype=torch.float32)
    check_padding(chunked, case, padding_mask("left"))


@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("backend", list(IMPLEMENTATIONS))
def test_packed_documents_equal_each_alone(backend: str, name: str) -> None:
    case = make_case(SPECS[name], 90, batch=5, kv_heads=1, repeats=2, head_dim=4)
    check_documents(IMPLEMENTATIONS[backend], case, segment_ids())


@pytest.mark.parametrize("backend", list(IMPLEMENTATIONS))
def test_many_short_documents_beside_a_long_one(backend: str) -> None:
    case = make_case(SPECS["terraced-4"], 90, batch=5, kv_heads=1, repeats=2, head_dim=4)
    check_documents(IMPLEMENTATIONS[backend], case, many_documents())


@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("backend", list(IMPLEMENTATIONS))
def test_packed_sequences_equal_each_alone(backend: str, name: str) -> None:
    """Two calls, the second from the states of the first; behind the sequences there is padding."""
    lengths = [[5, 0, 61, 20], [30, 1, 0, 50]]
    parts = [make_case(SPECS[name], 90, batch=1, repeats=2, head_dim=4, seed=seed) for seed in range(2)]
    together: HybridState | None = None
    alone: list[HybridState | None] = [None] * 4
    for part, sizes in zip(parts, lengths, strict=True):
        cu_seqlens = torch.tensor([0, *sizes]).cumsum(0)
        y, together = part.run(IMPLEMENTATIONS[backend], cu_seqlens=cu_seqlens.int(), state=together, return_state=True)
        assert together is not None
        assert not y[:, :, cu_seqlens[-1] :].any()
        for n, (begin, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False)):
            if begin < end:
                expected, alone[n] = part.part(begin, end).run(reference, state=alone[n], return_state=True)
                assert_near(y[:, :, begin:end], expected, 1e-12, f"sequence {n}")
            if (right := alone[n]) is not None:
                assert_states_near(together.select(torch.tensor([n])), right, 1e-12, f"sequence {n}")


@pytest.mark.parametrize("backend", list(IMPLEMENTATIONS))
def test_packed_sequences_are_documents(backend: str) -> None:
    """Without a state the two ways to say it give the same, gradients too."""
    case = make_case(SPECS["terraced-4"], 90, batch=1)
    cu_seqlens, ids = torch.tensor([0, 50, 51, 80]), torch.tensor([[0] * 50 + [1] + [2] * 29 + [-1] * 10])
    attend = IMPLEMENTATIONS[backend]
    y, gradients = results_and_gradients(attend, case, None, cu_seqlens=cu_seqlens)
    expected, expected_gradients = results_and_gradients(attend, case, None, segment_ids=ids)
    assert_near(y["output"], expected["output"], 1e-12, "output")
    for name, right in expected_gradients.items():
        assert_near(gradients[name], right, 1e-12, name)


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
def test_an_integer_mask_means_the_same(kind: str) -> None:
    case = make_case(SPECS["terraced-4"], 90, batch=5)
    y, _ = case.run(chunked, mask=padding_mask(kind))
    y_int, _ = case.run(chunked, mask=padding_mask(kind).long())
    assert torch.equal(y, y_int)


@pytest.mark.parametrize("kind", ["left", "holes"])
def test_catches_padding_ignored(kind: str) -> None:
    case = make_case(SPECS["terraced-4"], 90, batch=5)
    with pytest.raises(AssertionError, match="padding, row"):
        check_padding(hybrid_wrong.padding_ignored, case, padding_mask(kind))


def test_catches_right_padding_in_the_state() -> None:
    """Ignored right padding leaves the outputs right: only the state tells."""
    case = make_case(SPECS["terraced-4"], 90, batch=5)
    with pytest.raises(AssertionError, match="padding, row 1: position"):
        check_padding(hybrid_wrong.padding_ignored, case, padding_mask("right"))


def test_catches_documents_ignored() -> None:
    with pytest.raises(AssertionError, match="documents, row 1, tokens 5-69"):
        check_documents(hybrid_wrong.documents_ignored, make_case(SPECS["terraced-4"], 90, batch=5), segment_ids())


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
def test_rows_from_mask_align_and_restore(kind: str) -> None:
    mask = padding_mask(kind)
    rows = rows_from_mask(mask)
    x = torch.randn(5, 2, 90, 3)
    aligned = rows.align(x)
    assert rows.length_N.tolist() == LENGTHS.tolist()
    for b, length in enumerate(LENGTHS.tolist()):
        assert torch.equal(aligned[b, :, :length], x[b][:, mask[b]])
    assert torch.equal(rows.restore(aligned), x * mask[:, None, :, None])


def test_rows_from_segments_have_one_row_per_document() -> None:
    rows = rows_from_segments(segment_ids())
    assert rows.length_N.tolist() == [90, 5, 64, 21, 1, 1, 70, 30, 30]
    x = torch.randn(5, 2, 90, 3)
    assert torch.equal(rows.restore(rows.align(x)), x * (segment_ids() >= 0)[:, None, :, None])


def test_rows_from_borders_have_one_row_per_sequence() -> None:
    rows = rows_from_borders(torch.tensor([0, 3, 3, 80]), 90)
    assert rows.length_N.tolist() == [3, 0, 77]
    x = torch.randn(1, 2, 90, 3)
    assert torch.equal(rows.align(x)[0, :, :3], x[0, :, :3])
    assert torch.equal(rows.align(x)[2], x[0, :, 3:80])
    assert torch.equal(rows.restore(rows.align(x))[:, :, :80], x[:, :, :80])
    assert not rows.restore(rows.align(x))[:, :, 80:].any()


@pytest.mark.parametrize("shortest", [1, 64])
def test_groups_of_rows_waste_little_and_lose_nothing(shortest: int) -> None:
    ids = many_documents()
    rows = rows_from_segments(ids)
    groups = by_length(rows, shortest)
    assert len(groups) > 1
    assert sorted(n for group in groups for n in group.length_N.tolist()) == sorted(rows.length_N.tolist())
    x = torch.randn(5, 2, 90, 3)
    restored = [group.restore(group.align(x)) for group in groups]
    assert torch.equal(torch.stack(restored).sum(0), x * (ids >= 0)[:, None, :, None])
    if shortest == 1:
        assert sum(group.source_NL.numel() for group in groups) <= 2 * rows.real_BT.sum()


def test_a_group_of_empty_sequences() -> None:
    case = make_case(SPECS["linear"], 200, batch=1)
    cu_seqlens = torch.tensor([0, 0, 0, 0, 200])
    assert len(by_length(rows_from_borders(cu_seqlens, 200))) == 2
    for attend in IMPLEMENTATIONS.values():
        assert_near(case.run(attend, cu_seqlens=cu_seqlens)[0], case.run(reference)[0], 1e-12, "output")


def test_rows_of_one_length_stay_together() -> None:
    rows = rows_from_segments(segment_ids())
    assert by_length(rows)[0] is rows


def test_what_inference_mode_computed_is_not_kept_for_training() -> None:
    case = make_case(SPECS["terraced-4"], 12, batch=2)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :3] = False
    with torch.inference_mode():
        case.run(chunked, mask=mask)
    q = case.q.clone().requires_grad_()
    y, _ = hybrid_attention(q, case.k, case.v, case.spec, case.params, mask=mask, backend="chunked")
    y.sum().backward()
    assert q.grad is not None
    assert q.grad[0, :, :3].eq(0).all()
