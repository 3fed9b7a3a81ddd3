"""Exact heads with a window (`exact_window`): what a sequence keeps of them has a fixed size, and lies in pages.

A head's ring has a slot for each of the first `sinks` tokens and for each of the last `window`, in as many pages as it
needs. Each page has [2, slots, C]: keys and values, C = D in the model's type or D + 4 bytes, packed as
`lolcats.ops.eight_bits` says.
The order is that of `ExactCacheLayer`, which cannot be used itself: a row of its memory is one tensor, here it is in
several pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lolcats.modeling.cache import held_places, place_of
from lolcats.modeling.softmax import Visible, softmax_attention
from lolcats.ops.eight_bits import pack
from lolcats.ops.hybrid_attention.api import has_kernel, supports_softmax_step
from lolcats.ops.hybrid_attention.pages import PagedBatch
from lolcats.ops.hybrid_attention.state import Scoring, Tokens

NO_PAGE = 0  # vLLM's block that no sequence has: what is written there is never read
# Single tokens read their rings into memory of this size, as many sequences at once as fit.
SCRATCH_BYTES = 128 << 20


@dataclass(frozen=True)
class Ring:
    """What a bounded exact head keeps of a sequence.

    Attributes:
        columns, dtype: C above, and the type they are kept in.
    """

    window: int
    sinks: int
    columns: int
    dtype: torch.dtype

    @property
    def slots(self) -> int:
        return self.window + self.sinks

    @property
    def slot_bytes(self) -> int:
        return 2 * self.columns * self.dtype.itemsize

    def pages(self, page_bytes: int) -> int:
        """How many pages it needs."""
        return -(-self.slots // (page_bytes // self.slot_bytes))


class RingPages:
    """The rings of a batch's sequences in one layer, of which each has its pages at one place.

    Args:
        memory_NPC: [places, heads * pages of each, bytes] uint8.
        page_B: the place of each sequence, `NO_PAGE` where it has none.
    """

    def __init__(self, ring: Ring, memory_NPC: Tensor, page_B: Tensor) -> None:
        self.slots = memory_NPC.shape[2] // ring.slot_bytes  # of a page
        parts = memory_NPC[:, :, : self.slots * ring.slot_bytes].view(ring.dtype)
        self.parts = parts.unflatten(2, (2, self.slots, -1)).unflatten(1, (-1, ring.pages(memory_NPC.shape[2])))
        self.page_B = page_B.long()

    def read(self, rows: slice, slots: int) -> list[Tensor]:
        """Copies of keys and values [B, G, slots, C] in the first slots."""
        there = self.parts[:, :, : -(-slots // self.slots), :, :slots]
        return [there[:, :, :, i][self.page_B[rows]].flatten(2, 3)[:, :, :slots] for i in (0, 1)]

    def write(self, rows: slice, slot_T: Tensor, new_TG2C: Tensor) -> None:
        """Put a token into a slot of each of some sequences, or several into different slots of one."""
        self.parts[self.page_B[rows], :, slot_T // self.slots, :, slot_T % self.slots] = new_TG2C


def ring_attention(
    ring: Ring,
    tokens: Tokens,
    memory_NPC: Tensor,
    batch: PagedBatch,
    scoring: Scoring,
) -> None:
    """Softmax attention of tokens of several sequences: each sees the last `window` tokens and the first `sinks`.

    Args:
        tokens, batch: as in `paged_attention`, with `heads_G`, the heads that the rings belong to.
        memory_NPC: see `RingPages`; the pages of the batch are written.
        scoring: its sink logits are of the query heads of `heads_G`.
    """
    rings = RingPages(ring, memory_NPC, batch.page_B)
    q, k, v = (tokens.select(x) for x in tokens[:3])
    if ring.dtype == torch.int8:
        k, v = pack(k), pack(v)
    new_NG2C = torch.stack([k, v], 2)

    at_once = max(SCRATCH_BYTES // (ring.slots * ring.slot_bytes * k.shape[1]), 1)
    for first in range(0, batch.singles, at_once):
        rows = slice(first, min(first + at_once, batch.singles))
        position_B = batch.position_B[rows]
        rings.write(rows, place_of(position_B, ring.window, ring.sinks), new_NG2C[rows])
        used = ring.slots if batch.steps else min(max(batch.seen[rows]) + 1, ring.slots)
        keys, values = rings.read(rows, used)
        length_B = (position_B + 1).clamp_max(ring.slots)
        q_BH1D = q[rows, :, None]
        if not has_kernel("auto", q_BH1D, partial(supports_softmax_step, q_BH1D, keys, values)):
            unused_BS = torch.arange(used, device=q.device) >= length_B[:, None]  # NaN, if they were another layer's
            keys, values = (x.masked_fill(unused_BS[:, None, :, None], 0) for x in (keys, values))
        y_BH1D = softmax_attention(q_BH1D, keys, values, scoring, Visible(length=length_B))
        tokens.part(rows).put(y_BH1D.squeeze(2))

    for row in range(batch.singles, len(batch.seen)):
        own, rows, seen = slice(*batch.begin[row : row + 2]), slice(row, row + 1), batch.seen[row]
        position = torch.arange(seen, seen + own.stop - own.start, device=q.device)
        keys, values = (x.transpose(0, 1)[None] for x in (k[own], v[own]))
        if seen:
            slots, old = held_places(seen, ring.window, ring.sinks, q.device), rings.read(rows, min(seen, ring.slots))
            keys, values = (torch.cat([x[:, :, slots], new], 2) for x, new in zip(old, (keys, values), strict=True))
        q_1HTD, visible = q[own].transpose(0, 1)[None], Visible(ring.window, ring.sinks)
        y_1HTD = softmax_attention(q_1HTD, keys, values, scoring, visible)
        tokens.part(own).put(y_1HTD[0].transpose(0, 1))
        slot, new = place_of(position, ring.window, ring.sinks), new_NG2C[own]
        late = max(len(slot) - ring.window, 0)
        for kept in (slice(max(min(ring.sinks - seen, late), 0)), slice(late, None)):
            rings.write(rows, slot[kept], new[kept])
