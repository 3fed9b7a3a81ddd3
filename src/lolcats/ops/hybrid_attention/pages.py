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

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from lolcats.ops.hybrid_attention.state import HybridState, Sequences, Tokens


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
        layer: `kernels.paged.PagedLayer` of these, which `paged_attention` makes.
    """

    def __init__(self, parts: dict[str, Tensor], pages_NGC: Tensor) -> None:
        self.memory, begin = pages_NGC, 0
        self.views: dict[str, Tensor] = {}
        self.layer: Any = None
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
        page_2B: pages where each sequence's state is read and written, two int32 tensors of B or more. They differ
            only where sequences are cut so that a state between is kept: only for kernels.
        position_B: `seen` on the device, int64.
        begin_B: `begin` on the device.
        steps: how many of the first sequences have one token each, which goes into their pages without a copy of the
            states. What `begin` and `seen` say of these is not used.
        cut: numbers of the sequences whose rest the next one is.

    Attributes:
        singles: how many of the first sequences have one token each, `steps` if there are any.
        shared: see `hybrid_attention`. Also of batches of the same sequences with other pages.
    """

    def __init__(
        self,
        begin: Sequence[int],
        seen: Sequence[int],
        page_2B: Sequence[Tensor],
        position_B: Tensor,
        begin_B: Tensor,
        steps: int,
        shared: dict[Hashable, Any] | None = None,
        cut: Iterable[int] = (),
    ) -> None:
        self.page_B, self.position_B, self.steps = page_2B[1], position_B, steps
        self.begin, self.seen = begin, seen
        others = (row for row, (start, end) in enumerate(pairwise(begin)) if end - start != 1)
        self.singles = steps or next(others, len(seen))
        self.shared: dict[Hashable, Any] = {} if shared is None else shared
        self.rest: Sequences | None = None  # those behind `steps`
        if steps < len(seen):
            rows, cu_seqlens = slice(steps, len(seen)), begin_B[steps : len(begin)] - begin[steps]
            page_2N = tuple(x[rows].long() for x in page_2B)  # each in memory of its own, and so equally aligned
            borders, own = tuple(place - begin[steps] for place in begin[steps:]), tuple(row - steps for row in cut)
            self.rest = Sequences(page_2N, position_B[rows], cu_seqlens, tuple(seen[rows]), borders, own)


def paged_attention(
    tokens: Tokens,
    pages: StatePages,
    batch: PagedBatch,
    *,
    attend: Callable[..., Any],
    kernels: Callable[..., Any] | None = None,
) -> None:
    """Hybrid attention of tokens of several sequences whose states are in pages. Not differentiable.

    Args:
        tokens: the batch's; what lies behind them is neither read nor written.
        pages: states of the tokens' heads; those of the batch are written.
        attend: `hybrid_attention` as a function of q, k, v, state, cu_seqlens and return_state.
        kernels: `kernels.paged.PagedLayer`, a function of pages' views and a type; there are no `steps` without it.
    """
    if kernels is not None and pages.layer is None:
        pages.layer = kernels(pages.views, tokens.k_NGD.dtype)
    if steps := batch.steps:
        pages.layer.step(tokens.part(slice(steps)), batch.position_B[:steps], batch.page_B[:steps])
    if (rest := batch.rest) is None:
        return
    own = tokens.part(slice(batch.begin[steps], batch.begin[-1]))
    if pages.layer is not None:
        pages.layer.prefill(own, rest, batch.shared)
        return
    before = pages.load(rest.page_2N[0], rest.position_N) if any(rest.seen or ()) else None
    q_1HTD, k_1GTD, v_1GTD = (own.select(x).transpose(0, 1)[None] for x in own[:3])
    y_1HTD, after = attend(q_1HTD, k_1GTD, v_1GTD, state=before, cu_seqlens=rest.cu_seqlens, return_state=True)
    pages.store(rest.page_2N[1], after)
    own.put(y_1HTD[0].transpose(0, 1))
