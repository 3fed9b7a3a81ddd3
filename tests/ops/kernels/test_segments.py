"""The table of a ragged batch: its segments cover every token once, and its chunks every segment."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kernel_kit import DEVICE
from torch import Tensor

from lolcats.ops.hybrid_attention import remember
from lolcats.ops.hybrid_attention.kernels import segments
from lolcats.ops.hybrid_attention.kernels.segments import Segments


def check_cover(found: Segments, real_BT: Tensor) -> None:
    """Every token is in one segment, real or not as it should be; every segment has its chunks in order."""
    table, slots = found.table.tolist(), found.slots.tolist()
    cells = torch.zeros_like(real_BT, dtype=torch.int64)
    for n, (row, start, size, length, first_chunk) in enumerate(table[:-1]):
        cells[row, start : start + size] += 1
        assert real_BT[row, start : start + length].all()
        assert not real_BT[row, start + length : start + size].any()
        count = -(-size // 64)
        assert slots[first_chunk : first_chunk + count] == [n] * count
    assert (cells == 1).all()
    assert table[-1][2:4] == [0, 0]
    used = sum(-(-size // 64) for _, _, size, _, _ in table)
    assert slots[used:] == [len(table) - 1] * (len(slots) - used)


@pytest.mark.parametrize("lengths", [[130], [1, 63, 64, 65, 0, 3], [0, 0], [0, 128, 0]])
@pytest.mark.parametrize("padding", [0, 1, 70])
def test_borders(lengths, padding):
    tokens = sum(lengths) + padding
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    found = segments.from_borders(cu_seqlens, tokens)
    check_cover(found, (torch.arange(tokens, device=DEVICE) < sum(lengths))[None])
    row, start, length = found.places(len(lengths))
    assert (row.tolist(), start.tolist(), length.tolist()) == ([0] * len(lengths), cu_seqlens[:-1].tolist(), lengths)


@pytest.mark.parametrize("flip", [False, True])
def test_mask(flip):
    mask = torch.arange(70, device=DEVICE) >= torch.tensor([0, 1, 64, 70], device=DEVICE)[:, None]
    mask = mask.flip(1) if flip else mask
    found = segments.from_mask(mask)
    assert found is not None
    check_cover(found, mask)
    assert found.places(4)[0].tolist() == [0, 1, 2, 3]
    assert found.places(4)[2].tolist() == [70, 69, 6, 0]


def test_mask_with_padding_between():
    mask = torch.ones(2, 10, dtype=torch.bool, device=DEVICE)
    mask[1, 4] = False
    assert segments.from_mask(mask) is None


def test_ids():
    ids = torch.tensor([[0] * 70 + [1] * 5 + [-1] * 5, [1] * 2 + [-1] * 70 + [-2] * 3 + [1] * 5], device=DEVICE)
    found = segments.from_ids(ids)
    check_cover(found, ids >= 0)
    assert found.places()[2].tolist() == [70, 5, 0, 2, 0, 0, 5]


@pytest.fixture
def in_a_pass():
    remember.begin_pass()
    yield
    remember.end_pass()


def test_remembers_only_what_did_not_change(in_a_pass):
    ids = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)
    first = segments.of_ids(ids[:, :])
    assert segments.of_ids(ids[:, :]) is first  # another view of the same memory: the next layer
    assert segments.of_ids(ids.clone()) is not first
    assert segments.of_ids(ids[:, :4]).places()[2].tolist() == [4, 4]
    segments.of_ids(ids)
    ids[0, 4:] = 1
    check_cover(segments.of_ids(ids), ids >= 0)
    assert segments.of_ids(ids).places()[2].tolist() == [4, 4, 8]
    with torch.inference_mode():
        ids[0, 4:] = 0
    assert segments.of_ids(ids).places()[2].tolist() == [8, 8]


def test_remembers_within_one_pass_of_one_thread_alone(in_a_pass):
    ids = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)
    first = segments.of_ids(ids)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(segments.of_ids, ids).result() is not first
    remember.end_pass()
    ids.data[0, 4:] = 1  # counts no write
    assert segments.of_ids(ids).places()[2].tolist() == [4, 4, 8]


def test_inference_tensors_are_looked_at_every_time():
    with torch.inference_mode():
        ids = torch.zeros(1, 8, dtype=torch.int64, device=DEVICE)
        assert segments.of_ids(ids).places()[2].tolist() == [8]
        ids[0, 4:] = 1
        assert segments.of_ids(ids).places()[2].tolist() == [4, 4]
