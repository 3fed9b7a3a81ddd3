"""Exact heads with a window (`exact_window`): what a sequence keeps of them has a fixed size, and lies in pages.

A ring has a slot for each of the first `sinks` tokens and for each of the last `window`. A layer's ring begins behind
the state of its linear heads and goes on in pages of its own, as pages all have one size. Each page's part of it is
[2, G, slots, C]: keys and values, C = D in the model's type or D + 4 bytes, packed as `lolcats.ops.eight_bits` says.
The order is that of `ExactCacheLayer`, which cannot be used itself: a row of its memory is one tensor, here it is in
several pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lolcats.modeling.cache import held_positions, place_of
from lolcats.modeling.softmax import softmax_attention
from lolcats.ops.eight_bits import pack
from lolcats.ops.hybrid_attention.api import has_kernel
from lolcats.ops.hybrid_attention.kernels.support import supports_softmax_step
from lolcats.ops.hybrid_attention.pages import PagedBatch

NO_PAGE = 0  # vLLM's block that no sequence has: what is written there is never read
# Single tokens read their rings into memory of this size, as many sequences at once as fit.
SCRATCH_BYTES = 128 << 20


@dataclass(frozen=True)
class Ring:
    """What the bounded exact heads of one layer keep of a sequence.

    Attributes:
        state_bytes: of the layer's linear heads, which come first in its page.
        kv_heads, columns, dtype: G and C above, and the type they are kept in.
    """

    state_bytes: int
    window: int
    sinks: int
    kv_heads: int
    columns: int
    dtype: torch.dtype

    @property
    def slots(self) -> int:
        return self.window + self.sinks

    @property
    def slot_bytes(self) -> int:
        return 2 * self.kv_heads * self.columns * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.state_bytes + self.slots * self.slot_bytes

    def pages(self, page_bytes: int) -> int:
        """How many pages the layer needs."""
        left = self.slots - (page_bytes - self.state_bytes) // self.slot_bytes
        return 1 + max(-(-left // (page_bytes // self.slot_bytes)), 0)


def page_bytes(states: Sequence[int], rings: Sequence[Ring]) -> int:
    """The size of pages with which a sequence needs least memory, where all layers' are equally large."""
    least = max([*states, *(max(ring.state_bytes, ring.slot_bytes) for ring in rings)])
    # Pages that some layer fills with all that it keeps, with half of it, ..., rounded up to multiples of 16 bytes.
    parts = [(ring, count) for ring in rings for count in range(1, 1 + ring.pages(least))]
    fitting = {-(-(ring.nbytes // count + ring.slot_bytes) // 16) * 16 for ring, count in parts}
    sizes = [least, *sorted(size for size in fitting if size > least)]
    return min(sizes, key=lambda size: size * (len(states) + sum(ring.pages(size) for ring in rings)))


class RingPages:
    """The rings of a batch's sequences in one layer.

    Args:
        pages: in their order, memory of all pages [N, bytes] uint8, and the page of each sequence [B], negative where
            it has none.
    """

    def __init__(self, ring: Ring, pages: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.parts = []
        begin = ring.state_bytes
        for memory_NC, page_B in pages:
            slots = (memory_NC.shape[1] - begin) // ring.slot_bytes
            part = memory_NC[:, begin : begin + slots * ring.slot_bytes].view(ring.dtype)
            if slots:
                shape = (2, ring.kv_heads, slots, ring.columns)
                self.parts.append((part.unflatten(1, shape), page_B.clamp_min(NO_PAGE).long()))
            begin = 0

    def read(self, rows: slice, slots: int) -> tuple[Tensor, Tensor]:
        """Copies of keys and values [B, G, slots, C] in the first slots."""
        found = []
        for part, page_B in self.parts:
            found.append(part[:, :, :, :slots][page_B[rows]])
            slots -= found[-1].shape[3]
        keys, values = (found[0] if len(found) == 1 else torch.cat(found, 3)).unbind(1)
        return keys, values

    def write(self, rows: slice, slot_T: Tensor, new_T2GC: Tensor) -> None:
        """Put a token into a slot of each of some sequences, or several into different slots of one."""
        for part, page_B in self.parts:
            slots = part.shape[3]
            inside_T = (slot_T >= 0) & (slot_T < slots)
            page_T = torch.where(inside_T, page_B[rows], NO_PAGE)
            part[page_T, :, :, slot_T.clamp(0, slots - 1)] = new_T2GC
            slot_T = slot_T - slots


def ring_attention(
    ring: Ring,
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    pages: Sequence[tuple[Tensor, Tensor]],
    batch: PagedBatch,
    y_NHD: Tensor,
    heads_G: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None = None,
) -> None:
    """Softmax attention of N tokens of several sequences: each sees the last `window` tokens and the first `sinks`.

    Args:
        q_NHD, k_NGD, v_NGD, batch, y_NHD: as in `paged_attention`.
        pages: see `RingPages`; those of the batch are written.
        heads_G: int64, the KV heads that the rings belong to; others are not read or written.
        sink_logits: of the query heads of `heads_G`.
    """
    rings = RingPages(ring, pages)
    settings: dict[str, Any] = {"scale": scale, "softcap": softcap, "sink_logits": sink_logits}
    kv_heads = k_NGD.shape[1]
    q, k, v = (x.unflatten(1, (kv_heads, -1)).index_select(1, heads_G).flatten(1, 2) for x in (q_NHD, k_NGD, v_NGD))
    if ring.dtype == torch.int8:
        k, v = pack(k), pack(v)
    new_N2GC = torch.stack([k, v], 1)

    def put(tokens: slice, y: Tensor) -> None:
        y_NHD[tokens].unflatten(1, (kv_heads, -1)).index_copy_(1, heads_G, y.unflatten(1, (len(heads_G), -1)))

    at_once = max(SCRATCH_BYTES // (ring.slots * ring.slot_bytes), 1)
    for first in range(0, batch.singles, at_once):
        rows = slice(first, min(first + at_once, batch.singles))
        position_B = batch.position_B[rows]
        rings.write(rows, place_of(position_B, ring.window, ring.sinks), new_N2GC[rows])
        used = ring.slots if batch.steps else min(max(batch.seen[rows]) + 1, ring.slots)
        keys, values = rings.read(rows, used)
        length_B = (position_B + 1).clamp_max(ring.slots)
        q_BH1D = q[rows, :, None]
        if not has_kernel("auto", q_BH1D, partial(supports_softmax_step, q_BH1D, keys, values)):
            unused_BS = torch.arange(used, device=q.device) >= length_B[:, None]  # NaN, if they were another layer's
            keys, values = (x.masked_fill(unused_BS[:, None, :, None], 0) for x in (keys, values))
        y_BH1D = softmax_attention(q_BH1D, keys, values, length=length_B, **settings)
        put(rows, y_BH1D.squeeze(2))

    for row in range(batch.singles, len(batch.seen)):
        tokens, rows, seen = slice(*batch.begin[row : row + 2]), slice(row, row + 1), batch.seen[row]
        position = torch.arange(seen, seen + tokens.stop - tokens.start, device=q.device)
        keys, values = (x.transpose(0, 1)[None] for x in (k[tokens], v[tokens]))
        reach: dict[str, Any] = {"sliding_window": ring.window, "sinks": ring.sinks}
        if seen:
            old_keys, old_values = rings.read(rows, min(seen, ring.slots))
            keys, values = torch.cat([old_keys, keys], 2), torch.cat([old_values, values], 2)
            slots = torch.arange(old_keys.shape[2], device=q.device)
            old = held_positions(slots.new_full((1, 1), seen), slots, ring.window, ring.sinks)
            reach["position"] = torch.cat([old, position[None]], 1)
        y_1HTD = softmax_attention(q[tokens].transpose(0, 1)[None], keys, values, **reach, **settings)
        put(tokens, y_1HTD[0].transpose(0, 1))
        slot, new = place_of(position, ring.window, ring.sinks), new_N2GC[tokens]
        late = max(len(slot) - ring.window, 0)
        for kept in (slice(max(min(ring.sinks - seen, late), 0)), slice(late, None)):
            rings.write(rows, slot[kept], new[kept])
