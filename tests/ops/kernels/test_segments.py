"""The table of a packed row: its segments cover every token once, and its chunks every segment."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kernel_kit import DEVICE

from lolcats.ops.hybrid_attention import remember
from lolcats.ops.hybrid_attention.kernels.segments import Segments
from lolcats.ops.hybrid_attention.remember import remembered


@pytest.mark.parametrize("lengths", [[130], [1, 63, 64, 65, 0, 3], [0, 0], [0, 128, 0]])
@pytest.mark.parametrize("padding", [0, 1, 70])
def test_borders(lengths, padding):
    """Every token is in one segment, padding in the last; every segment has its chunks in order."""
    tokens = sum(lengths) + padding
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    found = Segments.of_borders(cu_seqlens, tokens)
    table, slots = found.table.tolist(), found.slots.tolist()
    assert [row[:3] for row in table[:-2]] == [
        [start, length, length] for start, length in zip(cu_seqlens.tolist(), lengths, strict=False)
    ]
    assert table[-2][:3] == [sum(lengths), padding, 0]
    assert table[-1][1:3] == [0, 0]
    chunks = [n for n, row in enumerate(table) for _ in range(-(-row[1] // 64))]
    assert slots == chunks + [len(table) - 1] * (len(slots) - len(chunks))
    assert all(chunks.index(n) == row[3] for n, row in enumerate(table) if row[1])


@pytest.fixture
def in_a_pass():
    remember.begin_pass()
    yield
    remember.end_pass()


def lengths_of(cu_seqlens: torch.Tensor) -> list[int]:
    return remembered(Segments.of_borders, cu_seqlens, 8).table[:-2, 2].tolist()


def test_remembers_only_what_did_not_change(in_a_pass):
    cu_seqlens = torch.tensor([0, 4, 8], device=DEVICE)
    first = remembered(Segments.of_borders, cu_seqlens[:], 8)
    assert remembered(Segments.of_borders, cu_seqlens[:], 8) is first  # another view of the same memory: the next layer
    assert remembered(Segments.of_borders, cu_seqlens.clone(), 8) is not first
    assert lengths_of(cu_seqlens[:2]) == [4]
    assert lengths_of(cu_seqlens) == [4, 4]
    cu_seqlens[1] = 3
    assert lengths_of(cu_seqlens) == [3, 5]
    with torch.inference_mode():
        cu_seqlens[1] = 2
    assert lengths_of(cu_seqlens) == [2, 6]


def test_remembers_within_one_pass_of_one_thread_alone(in_a_pass):
    cu_seqlens = torch.tensor([0, 4, 8], device=DEVICE)
    first = remembered(Segments.of_borders, cu_seqlens, 8)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(remembered, Segments.of_borders, cu_seqlens, 8).result() is not first
    remember.end_pass()
    cu_seqlens.data[1] = 3  # counts no write
    assert lengths_of(cu_seqlens) == [3, 5]


def test_inference_tensors_are_looked_at_every_time():
    with torch.inference_mode():
        cu_seqlens = torch.tensor([0, 4, 8], device=DEVICE)
        assert lengths_of(cu_seqlens) == [4, 4]
        cu_seqlens[1] = 3
        assert lengths_of(cu_seqlens) == [3, 5]
