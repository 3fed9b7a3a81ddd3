"""Sums in two 16-bit planes: nothing is lost, and the first plane is the sums rounded."""

from __future__ import annotations

import pytest
import torch
from kit import make_case

from lolcats.ops.hybrid_attention.planes import in_planes, join_sums, split_sums

# Zeros, the smallest and largest denormals, a half to round, a carry into the exponent, the largest number, infinities.
BITS = [0x0, 0x1, 0x8000, 0x8001, 0x7FFFFF, 0x3F7FFFFF, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]


def test_nothing_is_lost_and_the_first_plane_is_the_nearest_bfloat16() -> None:
    """Of all bit patterns above, of both signs, and random ones."""
    special = torch.tensor(BITS)
    bits = torch.cat([special, special - 2**31, torch.randint(-(2**31), 2**31, (4096 - 2 * len(BITS),))]).int()
    S = bits.view(torch.float32).view(1, 64, 64)
    planes = split_sums(S)
    assert (planes.shape, planes.dtype, planes.nbytes) == ((1, 2, 64, 64), torch.int16, S.nbytes)
    assert torch.equal(join_sums(planes).view(torch.int32), S.view(torch.int32))
    assert split_sums(planes) is planes
    assert join_sums(S) is S
    comparable = S.isfinite() & ((S.view(torch.int32) & 0xFFFF) != 0x8000)  # torch rounds halves to even
    assert torch.equal(planes[:, 0].view(torch.bfloat16)[comparable], S.to(torch.bfloat16)[comparable])


@pytest.mark.parametrize("tokens", [1, 3])
@torch.no_grad()
def test_every_implementation_takes_them(tokens: int) -> None:
    case = make_case("terraced 4", 40 + tokens)
    state = case.part(0, 40).run("auto", return_state=True)[1]
    planes = state.as_steps_keep(torch.bfloat16)
    assert in_planes(planes.S)
    expected, after = case.part(40, None).run("auto", state=state.clone(), return_state=True)
    y, found = case.part(40, None).run("auto", state=planes.clone(), return_state=True)
    assert torch.equal(y, expected)
    assert torch.equal(found.joined().S, after.S)
    assert not torch.equal(after.S, state.S)
