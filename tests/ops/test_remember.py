"""What layers compute from the borders of sequences is kept for a forward pass, and not longer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kit import DEVICE

from lolcats.ops.hybrid_attention import remember
from lolcats.ops.hybrid_attention.kernels.segments import Segments
from lolcats.ops.hybrid_attention.remember import remembered


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
    with ThreadPoolExecutor(1) as other:
        assert other.submit(remembered, Segments.of_borders, cu_seqlens, 8).result() is not first
    assert lengths_of(cu_seqlens[:2]) == [4]
    assert lengths_of(cu_seqlens) == [4, 4]
    cu_seqlens[1] = 3
    assert lengths_of(cu_seqlens) == [3, 5]
    with torch.inference_mode():
        cu_seqlens[1] = 2
    assert lengths_of(cu_seqlens) == [2, 6]
    remember.end_pass()
    cu_seqlens.data[1] = 3  # counts no write
    assert lengths_of(cu_seqlens) == [3, 5]
    remember.begin_pass()
    with torch.inference_mode():
        cu_seqlens = torch.tensor([0, 4, 8], device=DEVICE)
        assert lengths_of(cu_seqlens) == [4, 4]
        cu_seqlens[1] = 3
        assert lengths_of(cu_seqlens) == [3, 5]
