"""Paged states: random schedules of several sequences give what each gets alone, with a kernel's steps and without."""

import inspect
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
from lolcats.ops.hybrid_attention.state import Tokens


def pages_of(case: Case, count: int, **options) -> StatePages:
    """Pages of bytes that are NaN in every floating type, with some between them."""
    parts = page_parts(initial_state(case.config, case.params, case.k, **options))
    size = sum(x.nbytes for x in parts.values()) + 48
    memory = torch.full((case.k.shape[1], count, size), 0xFF, dtype=torch.uint8, device=DEVICE)
    return StatePages(parts, memory.transpose(0, 1))


@torch.no_grad()
def run_batch(case: Case, pages: StatePages, work: list[tuple[int, ...]], backend: str) -> list[Tensor]:
    """Output [H, T, D] of each (row of the case, tokens before, tokens, page, page of the state inside or 0); unused
    tokens follow the batch.

    Single tokens are steps of the kernel if the backend is "triton", others its prefill; the first one has no page
    then, and all have another key/value head behind each of theirs, without a state.
    """
    steps, kernels, heads, kv_heads = 0, {}, None, case.k.shape[1]
    if backend == "triton":
        from lolcats.ops.hybrid_attention.kernels.paged import PagedLayer

        kernels = {"kernels": partial(PagedLayer, config=case.config, params=case.params)}
        heads = 2 * torch.arange(kv_heads, device=DEVICE)
        work = [(0, 0, 1, 0, 0), *sorted(work, key=lambda item: item[2] > 1)]
        steps = sum(item[2] == 1 for item in work)
    parts = [
        torch.cat([x[row, :, seen : seen + tokens].transpose(0, 1) for row, seen, tokens, *_ in work])
        for x in (case.q, case.k, case.v)
    ]
    parts = [torch.cat([x, x.new_full((3, *x.shape[1:]), torch.nan)]) for x in parts]
    if heads is not None:
        grouped = [x.unflatten(1, (kv_heads, 1, -1)) for x in parts]
        parts = [torch.cat([x, torch.full_like(x, torch.nan)], 2).flatten(1, 3) for x in grouped]
    runs = []  # tokens, tokens before, and the pages
    for _, seen, tokens, page, inside in work:
        cut = tokens // 2 if inside else 0
        runs += [(cut, seen, page, inside)] * bool(inside) + [(tokens - cut, seen + cut, page, page)]
    begin, past = [0, *accumulate(run[0] for run in runs)], [run[1] for run in runs]
    page_2B = torch.tensor([run[2:] for run in runs], device=DEVICE).int().T.contiguous()
    position_B, begin_B = torch.tensor(past, device=DEVICE), torch.tensor(begin, device=DEVICE)
    cuts = [number for number, run in enumerate(runs) if run[2] != run[3]]
    batch = PagedBatch(begin, past, page_2B, position_B, begin_B, steps=steps, cut=cuts)
    attend = partial(hybrid_attention, config=case.config, params=case.params, backend="chunked")
    y = torch.zeros_like(parts[0])
    paged_attention(Tokens(*parts, y, heads), pages, batch, attend=attend, **kernels)
    assert (y[begin[-1] :] == 0).all(), "wrote behind the batch"
    if heads is not None:
        y, others = y.unflatten(1, (kv_heads, 2, -1)).unbind(2)
        y = y.flatten(1, 2)
        assert (others == 0).all(), "wrote other heads"
    bounds = pairwise([0, *accumulate(item[2] for item in work)])
    outputs = {item: y[start:end].transpose(0, 1) for item, (start, end) in zip(work, bounds, strict=True)}
    return [outputs[item] for item in work if item[3]]


KERNEL = (
    ("terraced 4 sinks=2", True),
    ("terraced 8", True),
    ("sliding 5 map=t2r", False),
    ("terraced 4 map=None", False),
    ("sliding 0", False),
)
SCHEDULES = [("chunked", config, (150, 1, 64, 65, 20), False) for config in CONFIGS]
SCHEDULES += [pytest.param("triton", config, (9, 19, 70, 12), packed, marks=needs_triton) for config, packed in KERNEL]


@pytest.mark.parametrize(("backend", "config", "lengths", "packed"), SCHEDULES)
def test_random_schedules(backend, config, lengths, packed):
    """Sequences come in at random times and are fed in random pieces from random pages. The kernel also keeps states
    inside of pieces; some sequences go on from there."""
    seed = CONFIGS.index(config) if config in CONFIGS else 0
    chance, batch = random.Random(seed), {"batch": len(lengths)}
    sizes = {"heads": 4, "kv_heads": 2} if backend == "triton" else varied(seed) | {"sink_logits": False}
    sizes |= {"head_dim": 100, "dtype": torch.bfloat16} if config == "terraced 8" else {}  # four columns at once
    case = make_case(config, max(lengths), **sizes | batch)
    pages, page = pages_of(case, 12, packed=packed), chance.sample(range(1, 12), len(lengths))
    used, free = set(page), [n for n in range(1, 12) if n not in page][:-1]
    left = [random_pieces(length, seed + row) for row, length in enumerate(lengths)]
    done: list[list[Tensor]] = [[] for _ in lengths]
    while any(left):
        rows = [row for row in range(len(lengths)) if left[row] and chance.random() < 0.7]
        chance.shuffle(rows)
        rows = sorted(rows, key=lambda row: left[row][0] > 1) if backend == "triton" else rows
        work = []
        for row in rows:
            tokens = left[row].pop(0)
            inside = free.pop() if free and backend == "triton" and tokens > 1 else 0
            work.append((row, sum(y.shape[1] for y in done[row]), tokens, page[row], inside))
        for (row, _, tokens, _, inside), y in zip(
            work, run_batch(case, pages, work, backend) if rows else [], strict=True
        ):
            back = tokens - tokens // 2 if inside and chance.random() < 0.7 else 0
            done[row].append(y[:, : tokens - back])
            if inside:
                page[row], inside = (inside, page[row]) if back else (page[row], inside)
                left[row] = [back] * bool(back) + left[row]
                free.insert(0, inside)
        used |= {n for item in work for n in item[3:]}
    if packed:
        case.k, case.v = (unpack(pack(x), x.dtype) for x in (case.k, case.v))
    expected, _ = case.map(torch.Tensor.double).run("reference")
    for row, length in enumerate(lengths):
        assert_near({f"{row}": torch.cat(done[row], 1)}, {f"{row}": expected[row, :, :length]}, case.q.dtype)
    others = [n for n in range(12) if n not in used - {0}]
    assert (pages.memory[others] == 0xFF).all(), "wrote into a page of no sequence"


@needs_triton
def test_calls_with_one_key_are_one_form_to_triton(monkeypatch):
    """Of the second Triton looks at nothing."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    from lolcats.ops.hybrid_attention.kernels import paged
    from lolcats.ops.hybrid_attention.kernels.operands import SIZES

    backend, forms, changing = CUDABackend(GPUTarget("cuda", 90, 32)), {}, {*SIZES, "count", "capacity"}

    class Watched(paged.Launches):
        def __call__(self, key, kernel, grid, *args, **constants):
            names = inspect.signature(kernel.fn).parameters
            given = [(x, False, name not in changing, True) for name, x in zip(names, args, strict=False)]
            form = [native_specialize_impl(backend, *each) for each in given]
            assert form == forms.setdefault((id(self), key, id(kernel), *constants.values()), form)
            super().__call__(key, kernel, grid, *args, **constants)

    monkeypatch.setattr(paged, "Launches", Watched)
    test_random_schedules("triton", "terraced 4 sinks=2", (9, 19, 70, 12), True)
    assert forms


@needs_triton
def test_tables_come_in_one_piece(monkeypatch):
    from lolcats.ops.hybrid_attention.kernels.paged import _moved

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **rest: empty(*sizes, **rest))
    tensors = [torch.arange(5 * n).view(n, 5) + n for n in (3, 0, 8, 5)]
    moved = _moved(tensors, torch.device("cpu"))
    assert all(map(torch.equal, moved, tensors))
    assert all(x.data_ptr() % 16 == 0 for x in moved)
