"""States in fixed-size pages of bytes, for servers that hand out memory in pages.

A page holds one sequence's state of one key/value head. Its parts follow one another without gaps, widest type first:

    S                [S, F, D] float32    sums over the tokens that left the window, see `HybridState`; S of this head
    z                [S, F] float32
    k, v             [1, C, D] each       the ring of the window, in the keys' type or packed, [1, C, D + 4] int8
    sink_k, sink_v   [1, sinks, D] each

The number of tokens that a sequence has seen is not in its page: the scheduler knows it. What a page holds before
a sequence's first token is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from lolcats.ops.hybrid_attention.state import HybridState


def page_parts(state: HybridState) -> dict[str, Tensor]:
    """The parts of a page, in order, as the state of a sequence has them for its first head, also one on "meta"."""
    heads = state.k.shape[1]
    return {name: x[0, : x.shape[1] // heads] for name, x in state._asdict().items() if name != "position"}


class StatePages:
    """The pages of one layer: a sequence has one for each head, all at the same place.

    Args:
        parts: what each page holds, see `page_parts`.
        pages_NGC: [places, heads, bytes] uint8 or int8, with room for the parts; it is not copied.

    Attributes:
        views: of each part [places, heads, ...].
    """

    def __init__(self, parts: dict[str, Tensor], pages_NGC: Tensor) -> None:
        self.memory, begin = pages_NGC, 0
        self.views: dict[str, Tensor] = {}
        for name, part in parts.items():
            end = begin + part.nbytes
            self.views[name] = pages_NGC[:, :, begin:end].view(part.dtype).unflatten(2, part.shape)
            begin = end

    def load(self, page_B: Tensor, position_B: Tensor) -> HybridState:
        """Copies of the states in the given pages, after `position_B` tokens each (int64); of 0 tokens empty ones."""
        found = {name: view[page_B].flatten(1, 2) for name, view in self.views.items()}
        for x in found.values():
            x.masked_fill_((position_B == 0).view(-1, *[1] * (x.dim() - 1)), 0)
        return HybridState(**found, position=position_B.clone())

    def store(self, page_B: Tensor, state: HybridState) -> None:
        """Put states into the given pages, which are all different."""
        for name, view in self.views.items():
            view[page_B] = getattr(state, name).unflatten(1, view.shape[1:3])


class PagedBatch:
    """Which sequences the tokens of a batch belong to, one sequence after the other.

    Args:
        begin: first token of each sequence in the batch, and the number of tokens at the end; B + 1 numbers.
        seen: B numbers, tokens that each sequence had before the batch.
        page_2B: pages where each sequence's state is read and written, int32, on the device. They differ where the next
            sequence is the rest of this one, cut so that the state between is kept: only for `prefill`.
        position_B: `seen` on the device, int64.
        begin_B: `begin` on the device.
        steps: how many of the first sequences have one token each, which goes into their pages without a copy of the
            states. What `begin` and `seen` say of these is not used.

    Attributes:
        singles: how many of the first sequences have one token each, `steps` if there are any.
        shared: see `hybrid_attention`.
    """

    def __init__(
        self,
        begin: Sequence[int],
        seen: Sequence[int],
        page_2B: Tensor,
        position_B: Tensor,
        begin_B: Tensor,
        steps: int,
    ) -> None:
        self.page_B, self.position_B, self.steps = page_2B[1], position_B, steps
        self.begin, self.seen = begin, seen
        others = (row for row, (start, end) in enumerate(pairwise(begin)) if end - start != 1)
        self.singles = steps or next(others, len(seen))
        self.shared: dict[Hashable, Any] = {}
        self.rest = None  # of the sequences behind `steps`: pages, positions and borders
        if steps < len(seen):
            rows = slice(steps, len(seen))
            self.rest = page_2B[:, rows].long(), position_B[rows], begin_B[steps : len(begin)] - begin[steps]


def paged_attention(
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    pages: StatePages,
    batch: PagedBatch,
    y_NHD: Tensor,
    *,
    attend: Callable[..., tuple[Tensor, HybridState | None]],
    step: Callable[..., Any] | None = None,
    prefill: Callable[..., Any] | None = None,
    heads_G: Tensor | None = None,
) -> None:
    """Hybrid attention of N tokens of several sequences whose states are in pages. Not differentiable.

    Args:
        q_NHD, k_NGD, v_NGD: queries, keys and values; what lies behind the batch's tokens is ignored.
        pages: states; those of the batch are written.
        y_NHD: is written where the batch has tokens.
        attend: `hybrid_attention` as a function of q, k, v, state, cu_seqlens and return_state.
        step: `kernels.decode.triton_step` as a function of all but config and params; takes the batch's `steps`.
        prefill: `kernels.prefill.prefill` as a function of all but config and params; takes all others.
        heads_G: int64, the key/value heads that the states belong to, where there are others, which are not read or
            written; None: all.
    """
    kv_heads = k_NGD.shape[1]
    if batch.steps:
        assert step is not None
        q, k, v, y = (x[: batch.steps, :, None] for x in (q_NHD, k_NGD, v_NGD, y_NHD))
        state = HybridState(**pages.views, position=batch.position_B[: batch.steps])
        step(q, k, v, state=state, page_B=batch.page_B[: batch.steps], y_BH1D=y, heads_G=heads_G)
    if batch.rest is None:
        return
    page_2B, position_B, cu_seqlens = batch.rest
    tokens, seen = slice(batch.begin[batch.steps], batch.begin[-1]), tuple(batch.seen[batch.steps :])
    own, y_THD = [x[tokens] for x in (q_NHD, k_NGD, v_NGD)], y_NHD[tokens]
    if prefill is not None:
        where: dict[str, Any] = {"page_2N": page_2B, "position_N": position_B, "cu_seqlens": cu_seqlens, "seen": seen}
        prefill(*own, parts=pages.views, **where, y_THD=y_THD, heads_G=heads_G, shared=batch.shared)
        return
    if heads_G is not None:
        own = [x.unflatten(1, (kv_heads, -1)).index_select(1, heads_G).flatten(1, 2) for x in own]
    q_1HTD, k_1GTD, v_1GTD = (x.transpose(0, 1)[None] for x in own)
    before = pages.load(page_2B[0], position_B) if any(seen) else None
    y_1HTD, after = attend(q_1HTD, k_1GTD, v_1GTD, state=before, cu_seqlens=cu_seqlens, return_state=True)
    assert after is not None
    pages.store(page_2B[1], after)
    y = y_1HTD[0].transpose(0, 1)
    if heads_G is None:
        y_THD.copy_(y)
    else:
        y_THD.unflatten(1, (kv_heads, -1)).index_copy_(1, heads_G, y.unflatten(1, (len(heads_G), -1)))
