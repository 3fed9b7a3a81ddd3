"""Padding and packed documents: each sequence gets what it gets alone."""

from __future__ import annotations

import hybrid_wrong
import pytest
import torch
from hybrid_cases import IMPLEMENTATIONS
from hybrid_cases import SPECS
from hybrid_cases import chunked
from hybrid_cases import make_case
from hybrid_checks import check_documents
from hybrid_checks import check_padding

from lolcats.ops.hybrid_attention.ragged import by_length
from lolcats.ops.hybrid_attention.ragged import rows_from_mask
from lolcats.ops.hybrid_attention.ragged import rows_from_segments

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


def test_rows_of_one_length_stay_together() -> None:
    rows = rows_from_segments(segment_ids())
    assert by_length(rows)[0] is rows
