"""One token of sequences whose states lie in pages: as the step with states of their own, and no copies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_kit import DEVICE, GPU, Case, make_case
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.ops.hybrid_attention.kernels.decode import paged_step
from lolcats.ops.hybrid_attention.pages import PageLayout, StatePages
from lolcats.ops.hybrid_attention.planes import join_sums

CONFIGS = {
    "terraced": AttentionConfig("terraced", 4, sinks=2),
    "sliding": AttentionConfig("sliding", 5, feature_map="t2r"),
    "no-linear-part": AttentionConfig("terraced", 4, feature_map=None),
}


def pages_of(case: Case, count: int) -> StatePages:
    """Pages of NaN, with some bytes between them."""
    features = state_heads = 0
    if case.params.k_weight is not None:
        assert case.config.feature_map is not None
        state_heads = case.params.k_weight.shape[0]
        features = case.params.k_weight.shape[2] * get_feature_map(case.config.feature_map).multiple
    kv_heads, head_dim = case.k.shape[1], case.k.shape[3]
    layout = PageLayout(case.config, kv_heads, state_heads or kv_heads, features, head_dim, case.k.dtype)
    return StatePages(layout, torch.full((count, layout.nbytes + 48), 0xFF, dtype=torch.uint8, device=DEVICE))


def run(case: Case, pages: StatePages, page_B: Tensor, begin_B: Tensor) -> Tensor:
    """[B, H, T, D]: in each step every sequence that has begun takes a token; the others have no page."""
    outputs = []
    rows = torch.arange(len(page_B), device=DEVICE)
    for t in range(case.q.shape[2]):
        position_B = (t - begin_B).clamp_min(0)
        now = torch.where(t >= begin_B, page_B, -1).int()
        q, k, v = (x[rows, :, position_B][:, :, None] for x in (case.q, case.k, case.v))
        y = torch.full_like(q, torch.nan)
        given = {"parts": pages.views, "page_B": now, "position_B": position_B, "y_BH1D": y}
        paged_step(q, k, v, case.config, case.params, **given)
        outputs.append(y)
    whole = torch.full_like(case.q, torch.nan)
    for row, begin in enumerate(begin_B.tolist()):
        steps = [y[row] for y in outputs[begin:]]
        whole[row, :, : len(steps)] = torch.cat(steps, 1)
    return whole


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.no_grad()
def test_paged_step_is_the_reference(config: AttentionConfig) -> None:
    case = make_case(config, 19, batch=3, heads=2, kv_heads=1)
    begin_B, page_B = torch.tensor([0, 3, 7], device=DEVICE), torch.tensor([5, 1, 3], device=DEVICE)
    pages = pages_of(case, 6)
    y = run(case, pages, page_B, begin_B)
    expected, _ = case.run("reference")
    taken = torch.arange(19, device=DEVICE) < 19 - begin_B[:, None]
    right = torch.isclose(y, expected, rtol=1e-3, atol=1e-4).all(-1) | ~taken[:, None]
    wrong = [f"{at}: {float((y - expected)[tuple(at)].abs().max()):.1e}" for at in (~right).nonzero().tolist()]
    assert not wrong, f"[sequence, head, token]: largest difference; {len(wrong)} of {right.numel()}: {wrong[:60]}"
    untouched = [0, 2, 4]
    assert (pages.memory[untouched] == 0xFF).all(), "wrote into a page of no sequence"
    # The comparison can fail: two sequences in one page.
    mixed = run(case, pages_of(case, 6), torch.tensor([5, 1, 1], device=DEVICE), begin_B)
    assert not torch.allclose(mixed[1, :, :16], expected[1, :, :16], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("window_size", [2, 0])
@torch.no_grad()
def test_heads_between_others(window_size: int) -> None:
    """Heads 0 and 2 of four have states; the step reads them where they stand, and writes only their outputs."""
    length = 5 if window_size else 2  # a block leaves
    case = make_case(AttentionConfig("terraced", window_size), length, batch=1, heads=4, kv_heads=2)
    page_B, begin_B = torch.tensor([1], device=DEVICE), torch.tensor([0], device=DEVICE)
    expected = run(case, pages_of(case, 2), page_B, begin_B)
    query_heads, others = [0, 1, 4, 5], [2, 3, 6, 7]

    def steps(table: list[int]) -> Iterator[Tensor]:
        pages = pages_of(case, 2)
        for t in range(length):
            q, k, v = (torch.full((1, n, 1, 16), torch.nan, device=DEVICE) for n in (8, 4, 4))
            q[:, query_heads], k[:, [0, 2]], v[:, [0, 2]] = (x[:, :, t, None] for x in (case.q, case.k, case.v))
            y = torch.full_like(q, 7.0)
            given = {"parts": pages.views, "page_B": page_B.int(), "position_B": begin_B + t, "y_BH1D": y}
            given["heads_G"] = torch.tensor(table, device=DEVICE)
            paged_step(q, k, v, case.config, case.params, **given)
            assert (y[:, others] == 7.0).all()
            yield y[:, query_heads]

    assert torch.equal(torch.cat([*steps([0, 2])], 2), expected)
    assert not torch.allclose(torch.cat([*steps([2, 0])], 2), expected)  # the comparison can fail


@torch.no_grad()
def test_a_used_page_begins_again() -> None:
    """What an earlier sequence left in a page is not seen by the next one's first tokens."""
    case = make_case(CONFIGS["terraced"], 19, batch=1, heads=2)
    pages, page_B, begin_B = pages_of(case, 2), torch.tensor([1], device=DEVICE), torch.tensor([0], device=DEVICE)
    first = run(case, pages, page_B, begin_B)
    other = replace(case, q=case.q.flip(2), k=case.k.flip(2), v=case.v.flip(2))
    run(other, pages, page_B, begin_B)
    assert torch.equal(run(case, pages, page_B, begin_B), first)


def with_float32_sums(pages: StatePages) -> dict[str, Tensor]:
    """The parts with S in one piece, as 32-bit models have it."""
    count, states, _, features, head_dim = pages.views["S"].shape
    pages_SPFD = torch.full((count, states, features, head_dim), torch.nan, device=DEVICE)
    return pages.views | {"S": pages_SPFD}


@pytest.mark.slow
@pytest.mark.parametrize("config", [AttentionConfig("terraced", 4, sinks=2), AttentionConfig("sliding", 5)], ids=str)
@torch.no_grad()
def test_sums_in_planes_are_those_in_float32(config: AttentionConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many additions to S, in a 16-bit model: bit for bit, though each step reads the upper half alone."""
    tokens, heads = (400, 4) if GPU else (26, 2)
    case = make_case(config, tokens, batch=1, heads=heads, kv_heads=heads // 2, dtype=torch.bfloat16)
    case.v = (1.0 + case.v.float()).to(torch.bfloat16)  # sums that grow
    begin_B, page_B = torch.tensor([0], device=DEVICE), torch.tensor([2], device=DEVICE)
    planes, whole = pages_of(case, 3), pages_of(case, 3)
    whole.views = with_float32_sums(whole)
    y, y_whole = (run(case, pages, page_B, begin_B)[0] for pages in (planes, whole))
    S, S_whole = (join_sums(pages.views["S"])[page_B] for pages in (planes, whole))
    assert torch.equal(S, S_whole)
    assert torch.equal(planes.views["z"][page_B], whole.views["z"][page_B])
    # Features and sums in bfloat16 (2^-9 of each, at most), of which an output adds many.
    error = (y.double() - y_whole.double()).norm() / y_whole.double().norm()
    assert error < 4e-3

    # The wrong variant: additions see the upper half alone, which soon is too coarse for them.
    lossy = pages_of(case, 3)
    one_step = paged_step

    def forget(*arguments: Any, parts: dict[str, Tensor], **options: Any) -> None:
        one_step(*arguments, parts=parts, **options)
        parts["S"][:, :, 1] = 0

    monkeypatch.setattr(sys.modules[__name__], "paged_step", forget)
    run(case, lossy, page_B, begin_B)
    assert not torch.allclose(join_sums(lossy.views["S"])[page_B], S, rtol=1e-4)
