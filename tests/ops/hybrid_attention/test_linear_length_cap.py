"""The linear length cap where the lists of specs do not show it: what it leaves alone, and faults that are found."""

from __future__ import annotations

from dataclasses import replace

import hybrid_wrong
import pytest
import torch
from hybrid_cases import IMPLEMENTATIONS, SPECS, Case, chunked, make_case, random_mask
from hybrid_checks import check_equation, check_split, run_in_pieces

NAMES = ["sliding-4", "terraced-4", "terraced-16-one-block-sinks-2", "terraced-8-cache-5"]
TOKENS = 30


def with_length_cap(case: Case, linear_length_cap: int) -> Case:
    return replace(case, spec=replace(case.spec, linear_length_cap=linear_length_cap))


@pytest.mark.parametrize("sizes", [[TOKENS], [12, *[1] * 18]], ids=["whole", "decoded"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", list(IMPLEMENTATIONS))
@torch.no_grad()
def test_nothing_changes_up_to_it(backend: str, name: str, sizes: list[int]) -> None:
    """Every token but the last is within a linear_length_cap of one less; the state is the same beyond it too."""
    case = make_case(SPECS[name], TOKENS, sink_logits=True)
    y, state = run_in_pieces(IMPLEMENTATIONS[backend], case, sizes)
    same, _ = run_in_pieces(IMPLEMENTATIONS[backend], with_length_cap(case, TOKENS), sizes)
    assert torch.equal(same, y)
    other, after = run_in_pieces(IMPLEMENTATIONS[backend], with_length_cap(case, TOKENS - 1), sizes)
    assert torch.equal(other[:, :, :-1], y[:, :, :-1])
    assert (other[:, :, -1] - y[:, :, -1]).abs().max() > 1e-4
    assert state is not None
    assert after is not None
    for part, tensor in state.tensors().items():
        assert torch.equal(after.tensors()[part], tensor), part


@pytest.mark.parametrize("options", [{}, {"scale": 0.3, "softcap": 1.5}], ids=str)
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if 0 < spec.linear_length_cap < TOKENS])
@pytest.mark.parametrize("backend", list(IMPLEMENTATIONS))
def test_equation(backend: str, name: str, options: dict) -> None:
    """As defined, by smaller weights of the linear part."""
    case = make_case(SPECS[name], TOKENS, batch=1, repeats=2, head_dim=3, sink_logits=True)
    check_equation(IMPLEMENTATIONS[backend], case, **options)


@torch.no_grad()
def test_decoding_sequences_at_different_positions() -> None:
    case = make_case(SPECS["terraced-16-sinks-3-linear_length_cap-70"], 120, batch=3, sink_logits=True)
    check_split(chunked, case, [80, *[1] * 40], mask=random_mask(3, 120, "left", 2))


def test_catches_a_length_cap_counted_from_the_call() -> None:
    case = make_case(SPECS["terraced-4-linear_length_cap-9"], 40)
    check_split(hybrid_wrong.length_cap_within_the_call, case, [40])
    for sizes in ([12, 28], [20, 20]):
        with pytest.raises(AssertionError, match="split, output"):
            check_split(hybrid_wrong.length_cap_within_the_call, case, sizes)
    with torch.no_grad(), pytest.raises(AssertionError, match="split, output"):
        check_split(hybrid_wrong.length_cap_within_the_call, case, [20, *[1] * 20], mask=random_mask(2, 40, "left", 1))
