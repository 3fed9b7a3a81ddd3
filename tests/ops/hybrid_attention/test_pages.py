"""Paged states: random schedules of several sequences give what each gives alone."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise

import pytest
import torch
from hybrid_cases import SHARES, SPECS, TOLERANCE, Case, assert_near, chunked, make_case, random_pieces, reference
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.ops.hybrid_attention.pages import PagedBatch, PageLayout, StatePages, paged_attention


def layout_of(case: Case, dtype: torch.dtype | None = None) -> PageLayout:
    """float64 keys have float64 sums, see `accumulation_dtype`."""
    features = state_heads = 0
    if case.spec.feature_map is not None:
        assert case.params.k_weight is not None
        state_heads = case.params.k_weight.shape[0]
        features = case.params.k_weight.shape[2] * get_feature_map(case.spec.feature_map).multiple
    kv_heads = case.k.shape[1]
    return PageLayout(case.spec, kv_heads, state_heads or kv_heads, features, case.q.shape[3], dtype or case.k.dtype)


def poisoned(layout: PageLayout, count: int, padding: int = 24) -> Tensor:
    """Pages of bytes that are NaN in every floating type."""
    return torch.full((count, layout.nbytes + padding), 0xFF, dtype=torch.uint8)


def run_batch(case: Case, pages: StatePages, work: list[tuple[int, int, int, int]]) -> list[Tensor]:
    """Output [H, T, D] of each (row of the case, tokens before, tokens, page); unused tokens follow the batch."""
    parts = {
        name: torch.cat([x[row, :, seen : seen + tokens].transpose(0, 1) for row, seen, tokens, _ in work])
        for name, x in (("q", case.q), ("k", case.k), ("v", case.v))
    }
    parts = {name: torch.cat([x, x.new_full((3, *x.shape[1:]), torch.nan)]) for name, x in parts.items()}
    begin = [0]
    for _, _, tokens, _ in work:
        begin.append(begin[-1] + tokens)
    seen = [item[1] for item in work]
    batch = PagedBatch(begin, seen, torch.tensor([item[3] for item in work]), torch.tensor(seen))
    y = torch.zeros_like(parts["q"])
    attend = partial(chunked, config=case.spec, params=case.params)
    with torch.no_grad():
        paged_attention(attend, parts["q"], parts["k"], parts["v"], pages, batch, y)
    assert (y[begin[-1] :] == 0).all(), "wrote behind the batch"
    return [y[start:end].transpose(0, 1) for start, end in pairwise(begin)]


def run_schedule(case: Case, lengths: list[int], seed: int) -> list[Tensor]:
    """Outputs of all sequences, which come in at random times and are fed in random pieces from random pages."""
    chance = random.Random(seed)
    layout = layout_of(case)
    pages = StatePages(layout, poisoned(layout, 12))
    page = chance.sample(range(12), len(lengths))
    left = [random_pieces(length, seed + row) for row, length in enumerate(lengths)]
    done: list[list[Tensor]] = [[] for _ in lengths]
    while any(left):
        rows = [row for row in range(len(lengths)) if left[row] and chance.random() < 0.7]
        chance.shuffle(rows)
        work = [(row, sum(len(y[0]) for y in done[row]), left[row].pop(0), page[row]) for row in rows]
        if not work:
            continue
        for (row, *_), y in zip(work, run_batch(case, pages, work), strict=True):
            done[row].append(y)
    return [torch.cat(outputs, dim=1) for outputs in done]


@pytest.mark.parametrize("name", list(SPECS))
def test_random_schedules(name: str) -> None:
    seed = list(SPECS).index(name)
    lengths = [150, 1, 64, 65, 20]
    case = make_case(SPECS[name], max(lengths), batch=5, repeats=2, share_state=SHARES[seed % 2], seed=seed)
    outputs = run_schedule(case, lengths, seed)
    expected, _ = case.run(reference)
    for row, length in enumerate(lengths):
        assert_near(outputs[row], expected[row, :, :length], TOLERANCE[torch.float64], f"sequence {row}")


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 32, 33])
def test_single_tokens_after_a_prompt_that_ends_near_a_block_border(tokens: int) -> None:
    case = make_case(AttentionConfig("terraced", 16), tokens + 20, batch=1, dtype=torch.float32)
    layout = layout_of(case)
    pages = StatePages(layout, poisoned(layout, 2))
    outputs = run_batch(case, pages, [(0, 0, tokens, 1)])
    for position in range(tokens, tokens + 20):
        outputs += run_batch(case, pages, [(0, position, 1, 1)])
    expected, _ = case.run(reference)
    assert_near(torch.cat(outputs, dim=1), expected[0], TOLERANCE[torch.float32], "output")


def test_a_copied_page_continues_the_sequence() -> None:
    """What a server does that keeps the states of shared prompts: bytes of one page into another."""
    case = make_case(AttentionConfig("sliding", 4, sinks=2), 40, batch=1)
    layout = layout_of(case)
    raw = poisoned(layout, 3)
    pages = StatePages(layout, raw)
    run_batch(case, pages, [(0, 0, 25, 0)])
    raw[2] = raw[0]
    first = run_batch(case, pages, [(0, 25, 15, 2)])[0]
    again = run_batch(case, pages, [(0, 25, 15, 0)])[0]
    expected, _ = case.run(reference)
    assert_near(first, expected[0, :, 25:], TOLERANCE[torch.float64], "copy")
    assert torch.equal(first, again), "the copy changed the page that it came from"


def test_another_sequence_in_a_used_page_starts_afresh() -> None:
    case = make_case(AttentionConfig("terraced", 4), 40, batch=2)
    layout = layout_of(case)
    pages = StatePages(layout, poisoned(layout, 1))
    run_batch(case, pages, [(0, 0, 40, 0)])
    single = run_batch(case, pages, [(1, 0, 1, 0)])[0]
    rest = run_batch(case, pages, [(1, 1, 39, 0)])[0]
    expected, _ = case.run(reference)
    assert_near(torch.cat([single, rest], dim=1), expected[1], TOLERANCE[torch.float64], "second sequence")


def test_pages_of_two_sequences_do_not_mix() -> None:
    case = make_case(AttentionConfig("terraced", 4), 30, batch=2)
    layout = layout_of(case)
    pages = StatePages(layout, poisoned(layout, 4))
    run_batch(case, pages, [(0, 0, 10, 3), (1, 0, 10, 1)])
    outputs = run_batch(case, pages, [(1, 10, 1, 1), (0, 10, 1, 3)])
    expected, _ = case.run(reference)
    assert_near(outputs[0], expected[1, :, 10:11], TOLERANCE[torch.float64], "second sequence")
    assert_near(outputs[1], expected[0, :, 10:11], TOLERANCE[torch.float64], "first sequence")


def pieces(lengths: list[int], seen: list[int]) -> list[tuple[int, int, bool, list[int] | None]]:
    """(first row, end, fresh, borders) of each piece."""
    begin = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    batch = PagedBatch(begin, seen, torch.zeros(len(seen)), torch.zeros(len(seen)))
    for piece in batch.pieces:
        assert piece.tokens == slice(begin[piece.rows.start], begin[piece.rows.stop])
    return [
        (x.rows.start, x.rows.stop, x.fresh, None if x.cu_seqlens is None else x.cu_seqlens.tolist())
        for x in batch.pieces
    ]


def test_neighbours_run_together() -> None:
    assert pieces([1, 1, 1, 0, 10, 10], [5, 9, 0, 4, 0, 0]) == [
        (0, 2, False, None),
        (2, 3, True, None),
        (4, 6, True, None),
    ]
    assert pieces([1, 8, 5, 7], [3, 3, 2, 0]) == [(0, 1, False, None), (1, 3, False, [0, 8, 13]), (3, 4, True, None)]
    assert pieces([0, 0], [1, 2]) == []
    assert pieces([], []) == []


def test_the_page_is_as_small_as_its_parts() -> None:
    layout = PageLayout(AttentionConfig("terraced", 64, sinks=2), 2, 4, 32, 16, torch.bfloat16)
    sums = 4 * 32 * 16 * 4 + 4 * 32 * 4
    window = 2 * 2 * 128 * 16 * 2
    sinks = 2 * 2 * 2 * 16 * 2
    assert layout.nbytes == sums + window + sinks
    assert next(iter(layout.parts)) == "S"
    views = StatePages(layout, torch.zeros(3, layout.nbytes, dtype=torch.int8)).views
    assert views["S"].shape == (3, 4, 2, 32, 16)  # in two planes of 16 bits
    assert views["v"].shape == (3, 2, 128, 16)
