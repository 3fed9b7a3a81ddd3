"""States in fixed-size pages of bytes, for servers that hand out memory in pages.

A page holds one sequence's state in one layer. Its parts follow one another without gaps, widest type first:

    S                [S, F, D] float32    sums over the tokens that left the window, see `HybridState`; with 16-bit
                                          keys [S, 2, F, D] int16, see `planes`
    z                [S, F] float32
    k, v             [G, C, D] each       the ring of the window, in the keys' type
    sink_k, sink_v   [G, sinks, D] each

The number of tokens that a sequence has seen is not in its page: the scheduler knows it. What a page holds before
a sequence's first token is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.planes import split_sums
from lolcats.ops.hybrid_attention.state import HybridState


@dataclass(frozen=True)
class PageLayout:
    """What a page of one layer holds.

    Attributes:
        config: window and sinks.
        kv_heads, state_heads, features, head_dim: G, S, F and D above.
        dtype: type of the keys and values.
    """

    config: AttentionConfig
    kv_heads: int
    state_heads: int
    features: int
    head_dim: int
    dtype: torch.dtype

    @cached_property
    def parts(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and type of each part of a page, in order; parts may be empty."""
        like = torch.empty(0, self.head_dim, dtype=self.dtype, device="meta")
        state = HybridState.zeros(self.config, 1, self.kv_heads, self.state_heads, self.features, like)
        if self.dtype.itemsize == 2:
            state.S = split_sums(state.S)
        return {name: (x.shape[1:], x.dtype) for name, x in state.tensors().items() if name != "position"}

    @property
    def nbytes(self) -> int:
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self.parts.values())


class StatePages:
    """The pages of one layer.

    Args:
        layout: what each page holds.
        pages_NC: [pages, bytes] uint8 or int8, at least `layout.nbytes` bytes each; it is not copied.
    """

    def __init__(self, layout: PageLayout, pages_NC: Tensor) -> None:
        self.config, self.memory = layout.config, pages_NC
        self.views: dict[str, Tensor] = {}
        begin = 0
        for name, (shape, dtype) in layout.parts.items():
            end = begin + shape.numel() * dtype.itemsize
            self.views[name] = pages_NC[:, begin:end].view(dtype).unflatten(1, shape)
            begin = end

    def load(self, page_B: Tensor, position_B: Tensor) -> HybridState:
        """Copies of the states in the given pages, after `position_B` tokens each (int64)."""
        return HybridState(**{name: view[page_B] for name, view in self.views.items()}, position=position_B.clone())

    def store(self, page_B: Tensor, state: HybridState) -> None:
        """Put states into the given pages, which are all different."""
        state = state.stored_as(self.views["S"])
        for name, view in self.views.items():
            view[page_B] = state.tensors()[name]


@dataclass(frozen=True)
class Piece:
    """Neighbouring sequences of a batch that run through one call.

    Attributes:
        fresh: they start here; else all have a state.
        cu_seqlens: borders of the sequences, from 0, as `hybrid_attention` takes them; None: all equally long.
    """

    rows: slice
    tokens: slice
    fresh: bool
    cu_seqlens: Tensor | None


class PagedBatch:
    """Which sequences the tokens of a batch belong to, one sequence after the other.

    Args:
        begin: first token of each sequence in the batch, and the number of tokens at the end; B + 1 numbers.
        seen: B numbers, tokens that each sequence had before the batch.
        page_B: page of each sequence, int32, on the device.
        position_B: `seen` on the device, int64.
        steps: how many of the first sequences have one token each, which goes into their pages without a copy of the
            states. What `begin` and `seen` say of these is not used.

    Attributes:
        singles: how many of the first sequences have one token each, `steps` if there are any.
    """

    def __init__(
        self, begin: Sequence[int], seen: Sequence[int], page_B: Tensor, position_B: Tensor, *, steps: int = 0
    ) -> None:
        self.page_B, self.position_B, self.steps = page_B, position_B, steps
        self.begin, self.seen = begin, seen
        others = (row for row, (start, end) in enumerate(pairwise(begin)) if end - start != 1)
        self.singles = steps or next(others, len(seen))
        lengths = [0] * steps + [end - start for start, end in pairwise(begin[steps:])]
        self.pieces: list[Piece] = []
        for rows in _runs(lengths, [past == 0 for past in seen]):
            borders = begin[rows.start : rows.stop + 1]
            cu_seqlens = None
            if len(set(lengths[rows])) > 1:
                cu_seqlens = torch.tensor([border - borders[0] for border in borders], device=page_B.device)
            self.pieces.append(Piece(rows, slice(borders[0], borders[-1]), seen[rows.start] == 0, cu_seqlens))


def _runs(lengths: Sequence[int], fresh: Sequence[bool]) -> Iterator[slice]:
    """Neighbours that may run together: single tokens or longer, all fresh or none; no tokens, no run."""
    first = 0
    for row, length in enumerate(lengths):
        if fresh[row] != fresh[first] or min(length, 2) != min(lengths[first], 2):
            if lengths[first]:
                yield slice(first, row)
            first = row
    if first < len(lengths) and lengths[first]:
        yield slice(first, len(lengths))


def paged_attention(
    attend: Callable[..., tuple[Tensor, HybridState | None]],
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    pages: StatePages,
    batch: PagedBatch,
    y_NHD: Tensor,
    step: Callable[..., None] | None = None,
    heads_G: Tensor | None = None,
) -> None:
    """Hybrid attention of N tokens of several sequences whose states are in pages. Not differentiable.

    Args:
        attend: `hybrid_attention` as a function of q, k, v, state, cu_seqlens and return_state.
        q_NHD, k_NGD, v_NGD: queries, keys and values; what lies behind the batch's tokens is ignored.
        pages: states; those of the batch are written.
        y_NHD: is written where the batch has tokens.
        step: `kernels.decode.paged_step` as a function of q, k, v, parts, page_B, position_B, y_BH1D and heads_G; takes
            the batch's `steps`.
        heads_G: int64, the key/value heads that the states belong to, where there are others, which are not read or
            written; None: all.
    """
    kv_heads = k_NGD.shape[1]
    if batch.steps:
        assert step is not None
        q, k, v, y = (x[: batch.steps, :, None] for x in (q_NHD, k_NGD, v_NGD, y_NHD))
        page_B, position_B = batch.page_B[: batch.steps], batch.position_B[: batch.steps]
        step(q, k, v, parts=pages.views, page_B=page_B, position_B=position_B, y_BH1D=y, heads_G=heads_G)
    for piece in batch.pieces:
        page_B = batch.page_B[piece.rows].long()
        rows = len(page_B) if piece.cu_seqlens is None else 1
        own = [x[piece.tokens] for x in (q_NHD, k_NGD, v_NGD)]
        if heads_G is not None:
            own = [x.unflatten(1, (kv_heads, -1)).index_select(1, heads_G).flatten(1, 2) for x in own]
        q_BHTD, k_BGTD, v_BGTD = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in own)
        before = None if piece.fresh else pages.load(page_B, batch.position_B[piece.rows])
        y_BHTD, after = attend(
            q_BHTD,
            k_BGTD,
            v_BGTD,
            state=before,
            cu_seqlens=piece.cu_seqlens,
            return_state=True,
        )
        assert after is not None
        pages.store(page_B, after)
        y = y_BHTD.transpose(1, 2).flatten(0, 1)
        if heads_G is None:
            y_NHD[piece.tokens] = y
        else:
            whole = y_NHD[piece.tokens].unflatten(1, (kv_heads, -1))
            whole.index_copy_(1, heads_G, y.unflatten(1, (len(heads_G), -1)))
