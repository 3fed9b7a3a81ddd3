"""Sums in two 16-bit planes: nothing is lost, and the first plane is the sums rounded."""

from __future__ import annotations

import pytest
import torch
from hybrid_cases import SPECS, make_case

from lolcats.ops import hybrid_attention
from lolcats.ops.hybrid_attention.planes import in_planes, join_sums, split_sums

# Zeros, the smallest and largest denormals, a half to round, a carry into the exponent, the largest number, infinities.
BITS = [0x0, 0x1, 0x8000, 0x8001, 0x7FFFFF, 0x3F7FFFFF, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]


def floats() -> torch.Tensor:
    """[1, F, D]: all bit patterns above, of both signs, and random ones."""
    generator = torch.Generator().manual_seed(0)
    special = torch.tensor(BITS)
    random = torch.randint(-(2**31), 2**31, (4096 - 2 * len(BITS),), generator=generator)
    return torch.cat([special, special - 2**31, random]).to(torch.int32).view(torch.float32).view(1, 64, 64)


def test_nothing_is_lost() -> None:
    S = floats()
    planes = split_sums(S)
    assert (planes.shape, planes.dtype, planes.nbytes) == ((1, 2, 64, 64), torch.int16, S.nbytes)
    assert torch.equal(join_sums(planes).view(torch.int32), S.view(torch.int32))
    assert split_sums(planes) is planes
    assert join_sums(S) is S
    planes[0, 1, 5, 7] += 1  # the comparison can fail
    assert not torch.equal(join_sums(planes).view(torch.int32), S.view(torch.int32))


def test_the_first_plane_is_the_nearest_bfloat16() -> None:
    S = floats()
    is_half = (S.view(torch.int32) & 0xFFFF) == 0x8000  # torch rounds these to even
    comparable = S.isfinite() & ~is_half
    first = split_sums(S)[:, 0].view(torch.bfloat16)
    assert torch.equal(first[comparable], S.to(torch.bfloat16)[comparable])
    cut_off = (S.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    assert not torch.equal(cut_off[comparable], S.to(torch.bfloat16)[comparable])


def state_and_next(tokens: int) -> tuple:
    case = make_case(SPECS["terraced-4"], tokens, dtype=torch.float32)
    q, k, v = (x[:, :, : tokens - 1] for x in (case.q, case.k, case.v))
    with torch.no_grad():
        _, state = hybrid_attention(q, k, v, case.spec, case.params, return_state=True)
    assert state is not None
    return case, state, [x[:, :, tokens - 1 :] for x in (case.q, case.k, case.v)]


@pytest.mark.parametrize("new", ["a token", "tokens"])
@torch.no_grad()
def test_every_implementation_takes_them(new: str) -> None:
    case, state, qkv = state_and_next(41)
    if new == "tokens":
        qkv = [x.expand(-1, -1, 3, -1) for x in qkv]
    planes = state.stored_as(torch.empty(0, dtype=torch.int16))
    assert in_planes(planes.S)
    expected, after = hybrid_attention(*qkv, case.spec, case.params, state=state.clone(), return_state=True)
    y, found = hybrid_attention(*qkv, case.spec, case.params, state=planes.clone(), return_state=True)
    assert found is not None
    assert after is not None
    assert torch.equal(y, expected)
    assert torch.equal(found.joined().S, after.S)
    assert not torch.equal(after.S, state.S)
