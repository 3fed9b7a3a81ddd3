"""Paged states: random schedules of several sequences give what each gets alone, with a kernel's steps and without."""

import random
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
from kit import CONFIGS, DEVICE, Case, assert_near, make_case, needs_triton, random_pieces, varied
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops import hybrid_attention, initial_state
from lolcats.ops.hybrid_attention.pages import PagedBatch, StatePages, page_parts, paged_attention


def pages_of(case: Case, count: int) -> StatePages:
    """Pages of bytes that are NaN in every floating type, with some between them."""
    parts = page_parts(initial_state(case.config, case.params, case.k))
    size = sum(x.nbytes for x in parts.values()) + 48
    return StatePages(parts, torch.full((count, size), 0xFF, dtype=torch.uint8, device=DEVICE))


def step_of(case: Case, **options):
    from lolcats.ops.hybrid_attention.kernels.decode import paged_step

    return partial(paged_step, config=case.config, params=case.params, **options)


@torch.no_grad()
def run_batch(case: Case, pages: StatePages, work: list[tuple[int, int, int, int]], backend: str) -> list[Tensor]:
    """Output [H, T, D] of each (row of the case, tokens before, tokens, page); unused tokens follow the batch.

    Single tokens are steps of the kernel if the backend is "triton"; the first one has no page then.
    """
    steps = 0
    if backend == "triton":
        work = [(0, 0, 1, -1), *sorted(work, key=lambda item: item[2] > 1)]
        steps = sum(tokens == 1 for _, _, tokens, _ in work)
    parts = [
        torch.cat([x[row, :, seen : seen + tokens].transpose(0, 1) for row, seen, tokens, _ in work])
        for x in (case.q, case.k, case.v)
    ]
    parts = [torch.cat([x, x.new_full((3, *x.shape[1:]), torch.nan)]) for x in parts]
    begin, seen = [0, *accumulate(item[2] for item in work)], [item[1] for item in work]
    page_B = torch.tensor([item[3] for item in work], device=DEVICE).int()
    batch = PagedBatch(begin, seen, page_B, torch.tensor(seen, device=DEVICE), steps=steps)
    attend = partial(hybrid_attention, config=case.config, params=case.params, backend="chunked")
    y = torch.zeros_like(parts[0])
    paged_attention(attend, *parts, pages, batch, y, step_of(case) if steps else None)
    assert (y[begin[-1] :] == 0).all(), "wrote behind the batch"
    outputs = {item: y[start:end].transpose(0, 1) for item, (start, end) in zip(work, pairwise(begin), strict=True)}
    return [outputs[item] for item in work if item[3] >= 0]


KERNEL = ("terraced 4 sinks=2", "sliding 5 map=t2r", "terraced 4 map=None")
SCHEDULES = [("chunked", config, (150, 1, 64, 65, 20)) for config in CONFIGS]
SCHEDULES += [pytest.param("triton", config, (9, 19, 12), marks=needs_triton) for config in KERNEL]


@pytest.mark.parametrize(("backend", "config", "lengths"), SCHEDULES)
def test_random_schedules(backend, config, lengths):
    """Sequences come in at random times and are fed in random pieces from random pages."""
    seed = CONFIGS.index(config) if config in CONFIGS else 0
    chance, batch = random.Random(seed), {"batch": len(lengths)}
    sizes = batch if backend == "triton" else varied(seed) | batch | {"sink_logits": False}
    case = make_case(config, max(lengths), **sizes)
    pages, page = pages_of(case, 12), chance.sample(range(12), len(lengths))
    cut = (lambda n, seed: [2, *[1] * (n - 2)] if seed % 2 else [1] * n) if backend == "triton" else random_pieces
    left = [cut(length, seed + row) for row, length in enumerate(lengths)]
    done: list[list[Tensor]] = [[] for _ in lengths]
    while any(left):
        rows = [row for row in range(len(lengths)) if left[row] and chance.random() < 0.7]
        chance.shuffle(rows)
        rows = sorted(rows, key=lambda row: left[row][0] > 1) if backend == "triton" else rows
        work = [(row, sum(y.shape[1] for y in done[row]), left[row].pop(0), page[row]) for row in rows]
        for row, y in zip(rows, run_batch(case, pages, work, backend) if rows else [], strict=True):
            done[row].append(y)
    expected, _ = case.map(torch.Tensor.double).run("reference")
    for row, length in enumerate(lengths):
        assert_near({f"{row}": torch.cat(done[row], 1)}, {f"{row}": expected[row, :, :length]}, case.q.dtype)
    others = [n for n in range(12) if n not in page]
    assert (pages.memory[others] == 0xFF).all(), "wrote into a page of no sequence"


# --- the kernel alone ------------------------------------------------------------------------------------------------


@torch.no_grad()
def steps(case: Case, parts: dict[str, Tensor], fill: float = torch.nan, after=lambda: None, **options) -> Tensor:
    """[1, H, T, D]: the tokens of one sequence, whose page is the second."""
    page_B, step, outputs = torch.tensor([1], device=DEVICE).int(), step_of(case, **options), []
    for t in range(case.tokens):
        now = case.part(t, t + 1)
        outputs.append(torch.full_like(now.q, fill))
        position_B = torch.tensor([t], device=DEVICE)
        step(now.q, now.k, now.v, parts=parts, page_B=page_B, position_B=position_B, y_BH1D=outputs[-1])
        after()
    return torch.cat(outputs, 2)


@needs_triton
@pytest.mark.parametrize("window_size", [2, 0])
def test_heads_between_others(window_size: int) -> None:
    """Heads 0 and 2 of four have states; the step reads them where they stand, and writes only their outputs."""
    length = 5 if window_size else 2  # a block leaves
    case = make_case(AttentionConfig("terraced", window_size), length, heads=4, kv_heads=2)
    expected = steps(case, pages_of(case, 2).views)
    query_heads, others = [0, 1, 4, 5], [2, 3, 6, 7]
    q, k, v = (torch.full((1, n, length, 16), torch.nan, device=DEVICE) for n in (8, 4, 4))
    q[:, query_heads], k[:, [0, 2]], v[:, [0, 2]] = case.q, case.k, case.v
    wide = Case(case.config, q, k, v, case.params)
    y = steps(wide, pages_of(case, 2).views, 7.0, heads_G=torch.tensor([0, 2], device=DEVICE))
    assert (y[:, others] == 7.0).all()
    assert torch.equal(y[:, query_heads], expected)
