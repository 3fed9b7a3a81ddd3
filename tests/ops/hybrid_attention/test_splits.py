"""Any split of a sequence into prefill chunks and single tokens = the whole."""

from __future__ import annotations

import hybrid_wrong
import pytest
import torch
from hybrid_cases import (
    FLOAT32_SPECS,
    IMPLEMENTATIONS,
    SHARES,
    SPECS,
    TOLERANCE,
    assert_near,
    assert_states_near,
    chunked,
    make_case,
    random_mask,
    random_pieces,
    reference,
)
from hybrid_checks import check_split, run_in_pieces

from lolcats.config.attention import AttentionConfig
from lolcats.ops import hybrid_attention


def ragged_case(name: str, tokens: int, **options):
    return make_case(SPECS[name], tokens, **({"batch": 3, "kv_heads": 1, "repeats": 3, "head_dim": 4} | options))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float64) for name in SPECS), *((name, torch.float32) for name in FLOAT32_SPECS)],
)
@pytest.mark.parametrize("backend", list(IMPLEMENTATIONS))
def test_random_pieces(backend: str, name: str, dtype: torch.dtype) -> None:
    seed = list(SPECS).index(name)
    case = ragged_case(name, 250, dtype=dtype, share_state=SHARES[seed % 2], seed=seed)
    with torch.no_grad():
        check_split(IMPLEMENTATIONS[backend], case, random_pieces(250, seed))


@pytest.mark.parametrize("name", list(SPECS))
def test_single_tokens_with_autograd(name: str) -> None:
    """With gradients enabled single tokens take the path of chunks."""
    case = ragged_case(name, 24)
    check_split(chunked, case, [3, *[1] * 20, 1])


@pytest.mark.parametrize("sizes", [[1] * 140, [64, 64, 12], [63, 1, 1, 75], [65, 75], [128, 1, 11], [139, 1]], ids=str)
@pytest.mark.parametrize("name", ["sliding-64", "terraced-64", "terraced-64-one-block", "sliding-70-sinks-3"])
def test_pieces_around_block_borders(name: str, sizes: list[int]) -> None:
    with torch.no_grad():
        check_split(chunked, ragged_case(name, 140), sizes)


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@pytest.mark.parametrize("name", list(SPECS))
def test_pieces_with_padding(name: str, kind: str) -> None:
    """Sequences of one batch stand at different positions from the first piece on."""
    seed = list(SPECS).index(name)
    mask = random_mask(3, 160, kind, seed)
    with torch.no_grad():
        check_split(chunked, ragged_case(name, 160), random_pieces(160, seed), mask=mask)


@pytest.mark.parametrize("prefix", [1, 37, 101])
@pytest.mark.parametrize("name", list(SPECS))
def test_pieces_after_a_ragged_state(name: str, prefix: int) -> None:
    case = ragged_case(name, prefix + 120, kv_heads=2, repeats=1)
    mask = random_mask(3, prefix, "left", prefix)
    with torch.no_grad():
        _, state = case.part(0, prefix).run(chunked, mask=mask, return_state=True)
        check_split(chunked, case.part(prefix, None), random_pieces(120, prefix), state=state)


@pytest.mark.parametrize("name", list(SPECS))
def test_a_ragged_state_continues_each_sequence_alone(name: str) -> None:
    """Three sequences of 0, 7 and 60 tokens go on together for 90 more."""
    case = ragged_case(name, 150)
    lengths = [0, 7, 60]
    mask = torch.arange(60) >= 60 - torch.tensor(lengths)[:, None]
    with torch.no_grad():
        _, state = case.part(0, 60).run(chunked, mask=mask, return_state=True)
        y, after = run_in_pieces(chunked, case.part(60, 150), [1, 1, 50, 1, 37], state=state)
        assert after is not None
        for b, length in enumerate(lengths):
            expected_y, expected = case.rows([b]).part(60 - length, 150).run(reference, return_state=True)
            assert expected is not None
            assert_near(y[b : b + 1], expected_y[:, :, length:], TOLERANCE[torch.float64], f"row {b}")
            assert_states_near(after.select(torch.tensor([b])), expected, TOLERANCE[torch.float64], f"row {b}")


@pytest.mark.parametrize("piece", [7, 64, 100])
@pytest.mark.parametrize("name", list(SPECS))
def test_inner_pieces_equal_the_whole(monkeypatch: pytest.MonkeyPatch, name: str, piece: int) -> None:
    """Without autograd long inputs are cut inside one call, which changes nothing."""
    case = ragged_case(name, 210)
    mask = random_mask(3, 210, "left", piece)
    expected_y, expected = case.run(chunked, mask=mask, return_state=True)  # one piece
    state = case.part(0, 33).run(reference, return_state=True)[1]
    later_y, _ = case.run(chunked, state=state)
    monkeypatch.setattr(hybrid_wrong.CHUNKED, "PIECE_TOKENS", piece)
    with torch.no_grad():
        y, after = case.run(chunked, mask=mask, return_state=True)
        y_without_state, _ = case.run(chunked, mask=mask)
        later, _ = case.run(chunked, state=state)
    assert after is not None
    assert expected is not None
    assert_near(y, expected_y, TOLERANCE[torch.float64], "pieces")
    assert_near(y_without_state, expected_y, TOLERANCE[torch.float64], "pieces, without the state")
    assert_near(later, later_y, TOLERANCE[torch.float64], "pieces, after a state")
    assert_states_near(after, expected, TOLERANCE[torch.float64], "pieces")


def test_catches_a_chunk_that_forgets_the_ring() -> None:
    case = ragged_case("terraced-4", 30)
    check_split(hybrid_wrong.chunk_forgets_the_ring, case, [30])
    with pytest.raises(AssertionError, match="split, output"):
        check_split(hybrid_wrong.chunk_forgets_the_ring, case, [15, 15])


def test_catches_a_chunk_that_drops_what_passes_the_window() -> None:
    case = ragged_case("terraced-4", 30)
    check_split(hybrid_wrong.chunk_drops_what_passes_the_window, case, [4] * 7 + [2])
    with pytest.raises(AssertionError, match="split, output"):
        check_split(hybrid_wrong.chunk_drops_what_passes_the_window, case, [15, 15])


def test_catches_another_window_for_single_tokens() -> None:
    case = ragged_case("terraced-4", 30)
    with torch.no_grad():
        check_split(hybrid_wrong.terraced_prefill_sliding_decode, case, [15, 15])
        with pytest.raises(AssertionError, match="split, output"):
            check_split(hybrid_wrong.terraced_prefill_sliding_decode, case, [15, *[1] * 15])


def test_catches_blocks_counted_from_the_end() -> None:
    with pytest.raises(AssertionError, match="split, output"):
        check_split(hybrid_wrong.blocks_from_the_end, ragged_case("terraced-4", 32), [15, 17])


def test_catches_one_position_for_the_whole_batch() -> None:
    case = ragged_case("sliding-4", 60)
    check_split(hybrid_wrong.one_position_for_all, case, [30, 30])
    with pytest.raises(AssertionError, match="split, output"):
        check_split(hybrid_wrong.one_position_for_all, case, [30, 30], mask=random_mask(3, 60, "left", 1))


def test_catches_padding_ignored_in_pieces() -> None:
    mask = random_mask(3, 60, "left", 1)
    with pytest.raises(AssertionError, match="split, output"):
        check_split(hybrid_wrong.padding_ignored, ragged_case("sliding-4", 60), [30, 30], mask=mask)


def test_the_default_backend_decodes_like_the_reference() -> None:
    """backend="auto", as all callers use it."""
    case = make_case(AttentionConfig("terraced", 8), 50)
    with torch.no_grad():
        check_split(hybrid_attention, case, [20, *[1] * 30])
