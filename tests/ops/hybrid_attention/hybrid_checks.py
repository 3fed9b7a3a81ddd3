"""Properties of the hybrid attention, as functions that take an implementation.

Each raises AssertionError with the name of the property.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from hybrid_cases import (
    GRADIENT_TOLERANCE,
    TOLERANCE,
    Attend,
    Case,
    assert_near,
    assert_states_near,
    packed,
    reference,
    unpacked,
)
from hybrid_loops import loop_attention
from torch import Tensor

from lolcats.ops import HybridState


def plain_softmax(case: Case, *, scale: float | None = None, softcap: float | None = None) -> Tensor:
    """Causal softmax attention in float64, written out."""
    q, k, v = case.q.double(), case.k.double(), case.v.double()
    repeats = q.shape[1] // k.shape[1]
    score = q @ k.repeat_interleave(repeats, 1).mT * (scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(torch.ones(case.tokens, case.tokens).triu(1).bool(), -torch.inf)
    if case.params.sink_logits is not None:  # one more column, without a value
        column = case.params.sink_logits.double()[:, None, None].expand(*score.shape[:-1], 1)
        score = torch.cat([score, column], dim=-1)
    return score.softmax(-1)[..., : case.tokens] @ v.repeat_interleave(repeats, 1)


def check_softmax_limit(attend: Attend, case: Case, **options) -> None:
    """A window that holds the whole sequence is softmax attention."""
    y, _ = case.run(attend, **options)
    assert_near(y.double(), plain_softmax(case, **options), TOLERANCE[case.q.dtype], "softmax limit")


def check_equation(attend: Attend, case: Case, **options) -> None:
    """Outputs and sums are those of the loops."""
    y, state = case.run(attend, return_state=True, **options)
    expected_y, S, z = loop_attention(case, **options)
    assert_near(y, expected_y, TOLERANCE[torch.float64], "equation, output")
    assert state is not None
    assert (state.position == case.tokens).all(), "equation, position"
    if S is not None and z is not None:
        assert_near(state.S, S, TOLERANCE[torch.float64], "equation, S")
        assert_near(state.z, z, TOLERANCE[torch.float64], "equation, z")


def results_and_gradients(
    attend: Attend, case: Case, state: HybridState | None, *, seed: int = 0, **options
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Everything that comes out, and the gradient of a random function of it for everything that goes in."""
    case = case.map(lambda tensor: tensor.detach().clone().requires_grad_())
    leaves = case.tensors()
    if state is not None:
        state = state.map(lambda tensor: tensor.detach().clone().requires_grad_(tensor.is_floating_point()))
        leaves |= {f"state.{name}": tensor for name, tensor in state.tensors().items() if tensor.requires_grad}
        options["state"] = state
    y, after = case.run(attend, **options)
    results = {"output": y}
    if after is not None:
        results |= {f"state.{name}": tensor for name, tensor in after.tensors().items()}
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros((), dtype=y.dtype)
    for tensor in results.values():
        if tensor.is_floating_point() and tensor.numel() > 0:
            random = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
            loss = loss + (tensor * random).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }
    return {name: tensor.detach() for name, tensor in results.items()}, named


def check_same_as_reference(attend: Attend, case: Case, *, state: HybridState | None = None, **options) -> None:
    """Output, state and every gradient are those of the reference in float64."""
    exact = case.map(lambda tensor: tensor.double())
    exact_state = None
    if state is not None:
        exact_state = state.map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    results, gradients = results_and_gradients(attend, case, state, **options)
    expected, expected_gradients = results_and_gradients(reference, exact, exact_state, **options)
    for name, tensor in expected.items():
        assert_near(results[name].double(), tensor.double(), TOLERANCE[case.q.dtype], f"reference, {name}")
    for name, tensor in expected_gradients.items():
        tolerance = GRADIENT_TOLERANCE[case.q.dtype]
        assert_near(gradients[name].double(), tensor, tolerance, f"reference, gradient of {name}", floor=1.0)


def run_in_pieces(
    attend: Attend,
    case: Case,
    sizes: list[int],
    *,
    mask: Tensor | None = None,
    state: HybridState | None = None,
) -> tuple[Tensor, HybridState | None]:
    """Feed the tokens piece by piece, each with the state after the one before; of each those that the mask takes."""
    outputs, begin = [], 0
    for size in sizes:
        piece = case.part(begin, begin + size)
        if mask is None:
            y, state = piece.run(attend, state=state, return_state=True)
        else:
            real = mask[:, begin : begin + size]
            piece, cu_seqlens = packed(piece, real)
            y, state = piece.run(attend, state=state, cu_seqlens=cu_seqlens, return_state=True)
            y = unpacked(y, real)
        outputs.append(y)
        begin += size
    return torch.cat(outputs, dim=2), state


def check_split(attend: Attend, case: Case, sizes: list[int], *, mask: Tensor | None = None) -> None:
    """Any split into chunks and single tokens gives the outputs and the state of the whole."""
    y, after = run_in_pieces(attend, case, sizes, mask=mask)
    expected_y, expected = run_in_pieces(reference, case, [case.tokens], mask=mask)
    assert after is not None
    assert expected is not None
    assert_near(y, expected_y, TOLERANCE[case.q.dtype], "split, output")
    assert_states_near(after, expected, TOLERANCE[case.q.dtype], "split")


def check_prefix(attend: Attend, case: Case, lengths: list[int]) -> None:
    """Appended tokens change nothing before them: neither their number nor what they are."""
    y, _ = case.run(attend)
    for length in lengths:
        alone, _ = case.part(0, length).run(attend)
        # One function, in matrices of other sizes: rounding of float64 only.
        assert_near(y[:, :, :length], alone, 1e-13, f"prefix of {length}, tokens appended")
        other = case.map(torch.clone)
        for tensor in (other.q, other.k, other.v):
            tensor[:, :, length:] = 3.0 - 2.0 * tensor[:, :, length:]
        changed, _ = other.run(attend)
        assert torch.equal(changed[:, :, :length], y[:, :, :length]), f"prefix of {length}, later tokens changed"


def check_packed(attend: Attend, case: Case, lengths: list[int]) -> None:
    """Sequences of a packed row get what each gets alone; padding after them gives zero and receives no gradient."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    end_of_all = sum(lengths)
    noisy = case.map(torch.clone)
    for tensor in (noisy.q, noisy.k, noisy.v):
        tensor[:, :, end_of_all:] = torch.nan
    y, after = noisy.run(attend, cu_seqlens=cu_seqlens, return_state=True)
    assert after is not None
    assert not y[:, :, end_of_all:].any(), "packed: output of padding is not zero"
    assert after.position.tolist() == lengths
    for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        if begin == end:
            assert not after.S[n].any(), f"packed, sequence {n}: state of no token"
            continue
        expected_y, expected = case.part(begin, end).run(reference, return_state=True)
        assert expected is not None
        assert_near(y[:, :, begin:end], expected_y, TOLERANCE[case.q.dtype], f"packed, sequence {n}")
        state = after.select(torch.tensor([n]))
        assert_states_near(state, expected, TOLERANCE[case.q.dtype], f"packed, sequence {n}")
    _, gradients = results_and_gradients(attend, noisy, None, cu_seqlens=cu_seqlens, return_state=True)
    for name in "qkv":
        assert not gradients[name][:, :, end_of_all:].any(), f"packed: gradient reaches {name} of padding"


def check_given_state_untouched(attend: Attend, case: Case) -> None:
    """Only steps write into the state they were given, and not where autograd may need it."""
    _, state = case.part(0, case.tokens - 2).run(attend, return_state=True)
    assert state is not None
    before = state.clone()
    case.part(case.tokens - 2, None).run(attend, state=state, return_state=True)
    with torch.enable_grad():
        case.part(case.tokens - 1, None).run(attend, state=state, return_state=True)
    needed = replace(state, S=state.S.clone().requires_grad_())
    case.part(case.tokens - 1, None).run(attend, state=needed, return_state=True)
    for name, tensor in before.tensors().items():
        assert torch.equal(state.tensors()[name], tensor), f"the given state.{name} changed"


def check_shared_state(attend: Attend, case: Case) -> None:
    """One state per key/value head = one per query head with the same key feature map in each group."""
    repeats = case.q.shape[1] // case.k.shape[1]
    params = case.params
    bias = None if params.k_bias is None else params.k_bias.repeat_interleave(repeats, 0)
    spread = params._replace(k_weight=params.k_weight.repeat_interleave(repeats, 0), k_bias=bias)
    y, state = case.run(attend, return_state=True)
    expected_y, expected = attend(case.q, case.k, case.v, case.spec, spread, return_state=True)
    assert state is not None
    assert expected is not None
    assert_near(y, expected_y, TOLERANCE[case.q.dtype], "shared state, output")
    assert_near(state.S.repeat_interleave(repeats, 1), expected.S, TOLERANCE[case.q.dtype], "shared state, S")


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).pow(2).mean() / expected.pow(2).mean()).sqrt().item()


def check_no_drift(attend: Attend, case: Case) -> None:
    """Decoding bf16 activations token by token is as exact at the end as just after the window filled."""
    exact = case.map(lambda tensor: tensor.double())
    with torch.no_grad():
        truth, expected = run_in_pieces(reference, exact, [100] * (case.tokens // 100))
        outputs, state = [], None
        for t in range(case.tokens):
            y, state = case.part(t, t + 1).run(attend, state=state, return_state=True)
            outputs.append(y)
    decoded = torch.cat(outputs, dim=2)
    begin = case.spec.capacity
    first, last = slice(begin, begin + 500), slice(case.tokens - 500, case.tokens)
    error_first = relative_rms(decoded[:, :, first], truth[:, :, first])
    error_last = relative_rms(decoded[:, :, last], truth[:, :, last])
    # All that is left is the rounding of the bf16 output: relative to each entry uniform in +-2^-9, an RMS of
    # about 2^-9 / sqrt(3) = 1.1e-3. Its estimate from 500 tokens x heads x dims varies by 1 %.
    assert error_first < 2e-3, f"drift: {error_first:.1e} at the start"
    assert error_last < 1.1 * error_first, f"drift: {error_first:.1e} at the start, {error_last:.1e} at the end"
    # Sums of 4 000 float32 terms: at most 4 000 x 6e-8 = 2.4e-4, as a random walk 4e-6.
    assert state is not None
    assert expected is not None
    assert relative_rms(state.S, expected.S) < 2e-5, "drift: S"
    assert relative_rms(state.z, expected.z) < 2e-5, "drift: z"
