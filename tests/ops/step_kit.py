"""What the tests of the decoding kernel share: steps from an empty state, compared with `reference` in float64.

Import it before any module that imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from kernel_kit import DEVICE, GPU, Case
from torch import Tensor

from lolcats.ops import HybridState, hybrid_attention
from lolcats.ops.hybrid_attention import initial_state

# Relative RMS error. float32: sums of some hundred products, on a GPU of three tf32 numbers each (2^-21);
# bfloat16 and float16: rounding of the output alone is 1.7e-3 and 2e-4, weights of the window are rounded too.
TOLERANCE = {torch.float32: 2e-5 if GPU else 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


def late(batch: int, tokens: int) -> Tensor:
    """[B, T] mask: every sequence begins three steps after the one before it, and pauses once."""
    step = torch.arange(tokens, device=DEVICE)
    begin = 3 * torch.arange(batch, device=DEVICE)[:, None]
    return (step >= begin) & (step != begin + 7)


Attend = Callable[..., tuple[Tensor, HybridState | None]]


def triton(case: Case, **options) -> tuple[Tensor, HybridState | None]:
    return hybrid_attention(case.q, case.k, case.v, case.spec, case.params, inplace=True, backend="triton", **options)


@torch.no_grad()
def run(case: Case, *, mask: Tensor | None = None, attend: Attend = triton, **options) -> tuple[Tensor, HybridState]:
    """All outputs [B, H, T, D] of single steps, and the state after them."""
    state = initial_state(case.spec, case.params, case.k)
    outputs = []
    for t in range(case.q.shape[2]):
        now = None if mask is None else mask[:, t : t + 1]
        y, after = attend(case.part(t, t + 1), state=state, mask=now, **options)
        assert after is not None
        state = after
        outputs.append(y)
    return torch.cat(outputs, dim=2), state


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, name: str) -> None:
    if expected.numel() == 0:
        return
    assert found.shape == expected.shape, name
    error = (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-2)
    assert error <= TOLERANCE[dtype], f"{name}: relative RMS error {error:.1e}"  # written so that NaN fails


def check(case: Case, *, mask: Tensor | None = None, attend: Attend = triton, **options) -> None:
    y, state = run(case, mask=mask, attend=attend, **options)
    exact = case.map(Tensor.double)
    expected, after = hybrid_attention(
        *(exact.q, exact.k, exact.v, exact.spec, exact.params),
        mask=mask,
        return_state=True,
        backend="reference",
        **options,
    )
    assert after is not None
    for t in range(case.q.shape[2]):
        assert_near(y[:, :, t], expected[:, :, t], case.q.dtype, f"output of step {t}")
    for name, right in after.tensors().items():
        assert_near(state.tensors()[name], right, case.q.dtype, name)
    assert torch.equal(state.position, after.position)
