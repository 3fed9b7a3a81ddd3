"""Rings of exact heads in pages: random schedules of several sequences give what each gives alone. Needs no vLLM."""

import random

import pytest
import torch

from lolcats.modeling.softmax import Visible, softmax_attention
from lolcats.ops import Scoring
from lolcats.ops.eight_bits import FACTOR_BYTES, pack
from lolcats.ops.hybrid_attention.pages import PagedBatch
from lolcats.ops.hybrid_attention.state import Tokens
from lolcats.vllm_plugin.rings import NO_PAGE, Ring, ring_attention

KV_HEADS, GROUP, DIM = 4, 2, 16
HEADS = [0, 3]  # those with rings
SCORING = Scoring(scale=0.3)
LENGTHS = (1, 2, 17, 18, 19, 63, 90)
DEVICE, TOLERANCE = ("cuda", 1e-3) if torch.cuda.is_available() else ("cpu", 2e-5)  # float32, sums in another order


def make_ring(packed: bool) -> Ring:
    columns, dtype = (DIM + FACTOR_BYTES, torch.int8) if packed else (DIM, torch.float32)
    return Ring(window=16, sinks=2, columns=columns, dtype=dtype)


def run_schedule(ring: Ring, size: int, steps: bool, tensors: list, seed: int) -> list[torch.Tensor]:
    """Outputs [T, H, D] of all sequences, which come in random pieces, in pages full of NaN.

    Args:
        size: of a page in bytes.
        steps: single tokens run without numbers of the host, in a batch with one sequence more that has no page.
    """
    chance = random.Random(seed)
    count = len(HEADS) * ring.pages(size)
    memory = torch.full((count, 20, size), 0xFF, dtype=torch.uint8, device=DEVICE).transpose(0, 1)
    pages = chance.sample(range(1, 20), len(LENGTHS))
    seen, done = [0] * len(LENGTHS), [[] for _ in LENGTHS]
    while any(left := [length - past for length, past in zip(LENGTHS, seen, strict=True)]):
        rows = [row for row in range(len(LENGTHS)) if left[row] and chance.random() < 0.7]
        if not rows:
            continue
        count = {row: min(left[row], chance.choice((1, 1, 1, 5, 30))) for row in rows}
        rows.sort(key=lambda row: count[row] > 1)
        begin = [0]
        for row in rows:
            begin.append(begin[-1] + count[row])
        singles = sum(count[row] == 1 for row in rows)
        page = torch.tensor([pages[row] for row in rows], device=DEVICE)
        position = torch.tensor([seen[row] for row in rows], device=DEVICE)
        past = [seen[row] * (count[row] > 1 or not steps) for row in rows]
        if steps and singles == len(rows):
            page = torch.cat([page, page.new_tensor([NO_PAGE])])
            position, singles, begin = torch.cat([position, position.new_zeros(1)]), singles + 1, [*begin, begin[-1]]
            past.append(0)
        begin_B = torch.tensor(begin, device=DEVICE)
        batch = PagedBatch(begin, past, page.expand(2, -1), position, begin_B, steps=singles if steps else 0)
        q, k, v = (
            torch.cat([*(x[row][seen[row] : seen[row] + count[row]] for row in rows), x[0][:1]]) for x in tensors
        )
        y = torch.zeros_like(q)
        heads = torch.tensor(HEADS, device=DEVICE)
        ring_attention(ring, Tokens(q, k, v, y, heads), memory, batch, SCORING)
        assert not y.unflatten(1, (KV_HEADS, -1))[:, [1, 2]].any(), "wrote other heads"
        for place, row in enumerate(rows):
            done[row].append(y[begin[place] : begin[place + 1]])
            seen[row] += count[row]
    others = [page for page in range(20) if page not in {NO_PAGE, *pages}]
    assert (memory[others] == 0xFF).all(), "wrote another's page"
    return [torch.cat(pieces).unflatten(1, (KV_HEADS, -1))[:, HEADS] for pieces in done]


def alone(ring: Ring, packed: bool, tensors: list) -> list[torch.Tensor]:
    outputs = []
    for q, k, v in zip(*tensors, strict=True):
        own = [x.unflatten(1, (KV_HEADS, -1))[:, HEADS].flatten(1, 2).transpose(0, 1)[None] for x in (q, k, v)]
        kept = [pack(x) if packed else x for x in own[1:]]
        y = softmax_attention(own[0], *kept, SCORING, Visible(ring.window, ring.sinks))
        outputs.append(y[0].transpose(0, 1).unflatten(1, (len(HEADS), -1)))
    return outputs


@pytest.mark.parametrize("steps", [False, True], ids=["pieces", "steps"])
@pytest.mark.parametrize("pages", [1, 3])
@pytest.mark.parametrize("packed", [False, True], ids=["float32", "8-bits"])
def test_random_schedules(packed, pages, steps) -> None:
    ring = make_ring(packed)
    size = 48 + -(-ring.slots // pages) * ring.slot_bytes
    assert ring.pages(size) == pages
    torch.manual_seed(pages)
    tensors = [
        [torch.randn(length, heads, DIM, device=DEVICE) for length in LENGTHS]
        for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    ]
    expected = alone(ring, packed, tensors)
    for seed in range(3):
        for y, right in zip(run_schedule(ring, size, steps, tensors, seed), expected, strict=True):
            torch.testing.assert_close(y, right, rtol=0, atol=TOLERANCE)
