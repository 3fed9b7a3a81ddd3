"""Paged states: random schedules of several sequences give what each gets alone, with a kernel's steps and without."""

import random
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
from kit import CONFIGS, DEVICE, Case, assert_near, make_case, needs_triton, random_pieces, varied
from torch import Tensor

from lolcats.ops import hybrid_attention, initial_state
from lolcats.ops.eight_bits import pack, unpack
from lolcats.ops.hybrid_attention.pages import PagedBatch, StatePages, page_parts, paged_attention


def pages_of(case: Case, count: int, **options) -> StatePages:
    """Pages of bytes that are NaN in every floating type, with some between them."""
    parts = page_parts(initial_state(case.config, case.params, case.k, **options))
    size = sum(x.nbytes for x in parts.values()) + 48
    return StatePages(parts, torch.full((count, size), 0xFF, dtype=torch.uint8, device=DEVICE))


@torch.no_grad()
def run_batch(case: Case, pages: StatePages, work: list[tuple[int, int, int, int]], backend: str) -> list[Tensor]:
    """Output [H, T, D] of each (row of the case, tokens before, tokens, page); unused tokens follow the batch.

    Single tokens are steps of the kernel if the backend is "triton", others its prefill; the first one has no page
    then, and all have another key/value head behind each of theirs, without a state.
    """
    steps, kernels, heads, kv_heads = 0, {}, None, case.k.shape[1]
    if backend == "triton":
        from lolcats.ops.hybrid_attention.kernels.decode import paged_step
        from lolcats.ops.hybrid_attention.kernels.prefill import prefill

        own = {"config": case.config, "params": case.params}
        kernels = {"step": partial(paged_step, **own), "prefill": partial(prefill, **own)}
        heads = 2 * torch.arange(kv_heads, device=DEVICE)
        work = [(0, 0, 1, -1), *sorted(work, key=lambda item: item[2] > 1)]
        steps = sum(tokens == 1 for _, _, tokens, _ in work)
    parts = [
        torch.cat([x[row, :, seen : seen + tokens].transpose(0, 1) for row, seen, tokens, _ in work])
        for x in (case.q, case.k, case.v)
    ]
    parts = [torch.cat([x, x.new_full((3, *x.shape[1:]), torch.nan)]) for x in parts]
    if heads is not None:
        grouped = [x.unflatten(1, (kv_heads, 1, -1)) for x in parts]
        parts = [torch.cat([x, torch.full_like(x, torch.nan)], 2).flatten(1, 3) for x in grouped]
    begin, seen = [0, *accumulate(item[2] for item in work)], [item[1] for item in work]
    page_B = torch.tensor([item[3] for item in work], device=DEVICE).int()
    position_B, begin_B = torch.tensor(seen, device=DEVICE), torch.tensor(begin, device=DEVICE)
    batch = PagedBatch(begin, seen, page_B, position_B, begin_B, steps=steps)
    attend = partial(hybrid_attention, config=case.config, params=case.params, backend="chunked")
    y = torch.zeros_like(parts[0])
    paged_attention(*parts, pages, batch, y, attend=attend, heads_G=heads, **kernels)
    assert (y[begin[-1] :] == 0).all(), "wrote behind the batch"
    if heads is not None:
        y, others = y.unflatten(1, (kv_heads, 2, -1)).unbind(2)
        y = y.flatten(1, 2)
        assert (others == 0).all(), "wrote other heads"
    outputs = {item: y[start:end].transpose(0, 1) for item, (start, end) in zip(work, pairwise(begin), strict=True)}
    return [outputs[item] for item in work if item[3] >= 0]


KERNEL = (
    ("terraced 4 sinks=2", True),
    ("sliding 5 map=t2r", False),
    ("terraced 4 map=None", False),
    ("sliding 0", False),
)
SCHEDULES = [("chunked", config, (150, 1, 64, 65, 20), False) for config in CONFIGS]
SCHEDULES += [pytest.param("triton", config, (9, 19, 70, 12), packed, marks=needs_triton) for config, packed in KERNEL]


@pytest.mark.parametrize(("backend", "config", "lengths", "packed"), SCHEDULES)
def test_random_schedules(backend, config, lengths, packed):
    """Sequences come in at random times and are fed in random pieces from random pages."""
    seed = CONFIGS.index(config) if config in CONFIGS else 0
    chance, batch = random.Random(seed), {"batch": len(lengths)}
    sizes = {"heads": 4, "kv_heads": 2} if backend == "triton" else varied(seed) | {"sink_logits": False}
    case = make_case(config, max(lengths), **sizes | batch)
    pages, page = pages_of(case, 12, packed=packed), chance.sample(range(12), len(lengths))
    left = [random_pieces(length, seed + row) for row, length in enumerate(lengths)]
    done: list[list[Tensor]] = [[] for _ in lengths]
    while any(left):
        rows = [row for row in range(len(lengths)) if left[row] and chance.random() < 0.7]
        chance.shuffle(rows)
        rows = sorted(rows, key=lambda row: left[row][0] > 1) if backend == "triton" else rows
        work = [(row, sum(y.shape[1] for y in done[row]), left[row].pop(0), page[row]) for row in rows]
        for row, y in zip(rows, run_batch(case, pages, work, backend) if rows else [], strict=True):
            done[row].append(y)
    if packed:
        case.k, case.v = (unpack(pack(x), x.dtype) for x in (case.k, case.v))
    expected, _ = case.map(torch.Tensor.double).run("reference")
    for row, length in enumerate(lengths):
        assert_near({f"{row}": torch.cat(done[row], 1)}, {f"{row}": expected[row, :, :length]}, case.q.dtype)
    others = [n for n in range(12) if n not in page]
    assert (pages.memory[others] == 0xFF).all(), "wrote into a page of no sequence"


@needs_triton
@pytest.mark.parametrize(("config", "packed"), KERNEL)
@torch.no_grad()
def test_state_inside_a_piece_is_kept(config, packed):
    """The rest of every sequence is run twice: from the state behind its second piece, and from the one inside."""
    from lolcats.ops.hybrid_attention.kernels.prefill import prefill

    # Tokens before the second piece, where it is cut (None: nowhere), where it ends; then the rest.
    bounds = [(0, 64, 70), (3, 9, 40), (5, None, 30), (70, 71, 90), (0, 1, 2), (20, 130, 131)]
    length, pages_of_row = 140, 3  # its own, one for the state inside, and one that is not written
    case = make_case(config, length, heads=4, kv_heads=2, batch=len(bounds))
    pages = pages_of(case, pages_of_row * len(bounds), packed=packed)
    q, k, v = (x.transpose(1, 2) for x in (case.q, case.k, case.v))
    y = torch.zeros_like(q)

    def run(work: list[tuple[int, int, int, int, int]]) -> None:
        """(row, first token, end, page to read, page to write) of each sequence."""
        at = torch.cat([row * length + torch.arange(first, end) for row, first, end, _, _ in work]).to(DEVICE)
        numbers = torch.tensor([[first, source, page] for _, first, _, source, page in work], device=DEVICE)
        position, source, page = numbers.unbind(1)
        borders = torch.tensor([0, *accumulate(end - first for _, first, end, _, _ in work)], device=DEVICE)
        own = [x.flatten(0, 1)[at] for x in (q, k, v)]
        out = torch.empty_like(own[0])
        where = {"page_N": page, "from_N": source, "position_N": position, "cu_seqlens": borders}
        seen = tuple(first for _, first, _, _, _ in work)
        prefill(*own, case.config, case.params, parts=pages.views, seen=seen, y_THD=out, **where)
        y.view(-1, *y.shape[2:])[at] = out

    rows = [(row, pages_of_row * row, *bound) for row, bound in enumerate(bounds)]
    run([(row, 0, start, page, page) for row, page, start, _, _ in rows if start])
    work = []
    for row, page, start, cut, end in rows:
        work += [(row, start, end, page, page)] if cut is None else [(row, start, cut, page, page + 1)]
        work += [] if cut is None else [(row, cut, end, page, page)]
    run(work)
    if packed:
        case.k, case.v = (unpack(pack(x), x.dtype) for x in (case.k, case.v))
    expected = case.map(torch.Tensor.double).run("reference")[0].transpose(1, 2)
    for name in ("behind", "inside"):
        rest = [(row, end, page) for row, page, _, _, end in rows]
        if name == "inside":
            rest = [(row, cut, page + 1) for row, page, _, cut, _ in rows if cut is not None]
        run([(row, first, length, page, page) for row, first, page in rest])
        found = {f"{name} {row}": y[row] for row, _, _ in rest}
        assert_near(found, {f"{name} {row}": expected[row] for row, _, _ in rest}, case.q.dtype)
        y.fill_(torch.nan) if name == "inside" else None
    assert (pages.memory[pages_of_row - 1 :: pages_of_row] == 0xFF).all(), "wrote into a page of no sequence"
