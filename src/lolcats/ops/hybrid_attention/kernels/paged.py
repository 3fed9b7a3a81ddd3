"""One layer's kernels for sequences whose states are read and written where they lie, as servers keep them in pages.

Importing this module needs Triton.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.kernels.decode import triton_step
from lolcats.ops.hybrid_attention.kernels.forward import forward
from lolcats.ops.hybrid_attention.kernels.operands import (
    NO_ROWS,
    Launches,
    Layout,
    Operands,
    Rows,
    Segments,
    Sums,
    alike,
    cdiv,
    rows,
    token_rows,
)
from lolcats.ops.hybrid_attention.kernels.store_tokens import Cache, Moves, move_tokens
from lolcats.ops.hybrid_attention.state import (
    HybridParams,
    HybridState,
    PagedStep,
    Sequences,
    Tokens,
    once,
    ring_positions,
)


class Tables:
    """Which token goes where, of `Sequences` in a row of T tokens.

    The kernels see a row of E entries: of every sequence the tokens of its ring that are in no sum yet, then its new
    tokens; at the end padding, if there is some, or if `seen` does not tell how many there are of the first kind.

    Attributes:
        length_N: new tokens of each sequence.
        start_N: tokens that each sequence had before the row, `position_N` but for the rest of one that was cut.
        kept, seen: the tokens of places of rings and sinks; those of entries, and of the sinks behind them; for layers
            with their states in any pages.
        segments: of the N sequences, and the padding after the last.
        base_N: int32, position of each sequence's first entry.
        query_N2: `Layout.queries`.
    """

    def __init__(
        self,
        config: AttentionConfig,
        position_N: Any,
        cu_seqlens: Any,
        seen: Any,
        borders: Any,
        cut: Any,
        tokens: int,
    ) -> None:
        count, capacity, target = len(position_N), config.capacity, position_N.device
        if borders is not None:  # some sixty operations, which a GPU would take longer to start
            position_N, cu_seqlens = torch.tensor(seen), torch.tensor(borders)
        device = position_N.device
        border_N = cu_seqlens.long().clamp(0, tokens)
        self.length_N = border_N.diff()
        end_N, is_cut_N = position_N + self.length_N, torch.zeros_like(position_N, dtype=torch.bool)
        if cut:
            is_cut_N[list(cut)] = True
        before_N = torch.where(is_cut_N.roll(1), self.length_N.roll(1), 0)
        self.start_N = position_N - before_N
        place_NC = torch.arange(capacity + config.sinks, device=device).repeat(count, 1)
        n_NC = torch.arange(count, device=device)[:, None].repeat(1, capacity + config.sinks)
        wanted_NC = torch.cat([ring_positions(end_N, capacity), place_NC[:, : config.sinks]], 1)
        new_NC = wanted_NC - position_N[:, None]
        is_new_NC = (new_NC >= -before_N[:, None]) & (wanted_NC < end_N[:, None])
        without_N1 = torch.where(self.start_N == 0, -1, -2)[:, None]
        token_NC = torch.where(is_new_NC, border_N[:-1, None] + new_NC, without_N1)
        self.kept = Moves(*(x.flatten() for x in (token_NC, n_NC, place_NC)))

        base_N, is_cut = config.window_start(position_N - 1), pad(is_cut_N, (0, 1))
        prior_N = position_N - base_N
        old = count * capacity if seen is None else sum(n - config.window_start(n - 1) for n in seen)
        first_N = border_N + pad(prior_N.cumsum(0), (1, 0))  # and the end of the last
        self.segments = Segments.of_lengths(first_N, pad(prior_N + self.length_N, (0, 1)), tokens + old, is_cut)
        self.base_N = base_N.int()
        self.query_N2 = torch.stack([border_N[:-1] - prior_N, prior_N], 1).int()
        index_E = torch.arange(tokens + old, device=device)
        n_E = torch.searchsorted(first_N[1:], index_E, right=True).clamp_max(count - 1)
        offset_E = index_E - (first_N[:-1] + prior_N)[n_E]
        last = border_N[-1] - 1
        token_E = torch.minimum(border_N[n_E] + offset_E, last).clamp_min(0)  # of padding any
        # Sinks that have not come yet are some other token: nobody sees them, but they must be finite.
        sink_NC = torch.minimum(border_N[:-1, None] + new_NC[:, capacity:], last).clamp_min(0)
        sink_NC = torch.where(new_NC[:, capacity:] < -before_N[:, None], -1, sink_NC)
        self.seen = Moves(
            torch.cat([torch.where(offset_E < -before_N[n_E], -1, token_E), sink_NC.flatten()]),
            torch.cat([n_E, n_NC[:, capacity:].flatten()]),
            torch.cat([(position_N[n_E] + offset_E) % max(capacity, 1), place_NC[:, capacity:].flatten()]),
        )
        if device != target:
            long = _moved([*self.kept[:3], *self.seen[:3], self.length_N, self.start_N], target)
            self.kept, self.seen, (self.length_N, self.start_N) = Moves(*long[:3]), Moves(*long[3:6]), long[6:]
            *segments, self.base_N, self.query_N2 = _moved([*self.segments, self.base_N, self.query_N2], target)
            self.segments = Segments(*segments)


def _moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of tensors of one type, by one transfer that nothing waits for, aligned as kernels are compiled for."""
    sizes = [cdiv(x.numel(), 4) * 4 for x in tensors]
    pinned = torch.empty(sum(sizes), dtype=tensors[0].dtype, pin_memory=True)
    for x, place in zip(tensors, pinned.split(sizes), strict=True):
        place[: x.numel()] = x.flatten()
    moved = pinned.to(device, non_blocking=True).split(sizes)
    return [place[: x.numel()].view(x.shape) for x, place in zip(tensors, moved, strict=True)]


class PagedLayer:
    """One layer of sequences whose states are read and written where they lie; without autograd. Nothing waits for the
    device, and for short prompts the host is the bottleneck: what kernels take in each call is made here, once.

    Args:
        parts: the views of `pages.StatePages`.
        dtype: of queries, keys and values.
    """

    def __init__(
        self, parts: dict[str, Tensor], dtype: torch.dtype, config: AttentionConfig, params: HybridParams
    ) -> None:
        self.parts, self.config, self.params, self.launches = parts, config, params, Launches()
        keys, values, *sinks = (parts[name][:, :, 0] for name in ("k", "v", "sink_k", "sink_v"))
        self.cache = Cache.of(keys, values, *[sinks] * (config.sinks > 0))
        sizes = len(params.window_factor), self.cache.heads
        q, k = (parts["S"].new_empty(1, heads, 0, self.cache.width, dtype=dtype) for heads in sizes)
        *own, sink_logits = (None if x is None else x.contiguous() for x in params.tensors)
        own.append(sink_logits if config.has_softmax else None)
        x = self.operands = Operands((q, k, k, *own, *[None] * 4), config, params.scale_of(q), params.softcap)
        x.sinks_there = config.sinks
        self.inputs, _, _ = x.inputs, x.shape, x.wide  # cached by x, and so of its copies
        self.sums = rows(parts["S"]), rows(parts["z"])

    def step(self, tokens: Tokens, position_B: Tensor, page_B: Tensor) -> None:
        """One token of each of B sequences."""
        q, k, v, y = (x[:, :, None] for x in tokens[:4])
        state, paged = HybridState(**self.parts, position=position_B), PagedStep(page_B, y, tokens.heads_G)
        launch = partial(self.launches, alike(*tokens[:4], position_B, page_B))
        triton_step(q, k, v, self.config, self.params, state=state, paged=paged, launch=launch)

    def prefill(self, tokens: Tokens, sequences: Sequences, shared: dict[Hashable, Any] | None = None) -> Tables:
        """Any tokens of N sequences, in a row. `shared`: see `hybrid_attention`.

        Five launches: keys and values, rounded as they are kept, behind those of the rings; three of `forward`; what is
        kept of the new ones. A sixth copies rings inside of sequences that were cut. Which token goes where is the same
        in all layers: `Tables`, made once for a pass.
        """
        page_2N, position_N = sequences[:2]
        x, cache, heads_G, sinks = copy(self.operands), self.cache, tokens.heads_G, self.config.sinks
        count, (total, _, width) = position_N.shape[0], tokens.k_NGD.shape
        tables = once(shared, Tables, self.config, *sequences[1:], total)
        seen, kept = (moves._replace(page_2N=page_2N) for moves in (tables.seen, tables.kept))
        near = [tokens.k_NGD.new_empty(seen.source.shape[0], cache.heads, width) for _ in range(2)]
        q, k, v, y, *dense = map(token_rows, (*tokens[:4], *near))
        row, first = cache.heads * width, seen.source.shape[0] - count * sinks
        key = alike(*tokens[:4], *page_2N), first * row % 16
        read, keep, x.launch, write = (partial(self.launches, (key, i)) for i in range(4))
        move_tokens((k, v), cache, seen, dense=dense, heads_G=heads_G, launch=read)
        if any((sequences.seen or ())[place] for place in sequences.cut):
            move_tokens((NO_ROWS, NO_ROWS), cache, kept, heads_G=heads_G, launch=keep)

        of_sinks = [Rows(rest[first:], sinks * row, width, row) if sinks else NO_ROWS for rest in near]
        table, slots = tables.segments
        # As many heads as of keys; which ones, the kernel looks up.
        x.layout = Layout(tables.base_N, table, slots, tables.query_N2, heads_G)
        x.inputs = self.inputs._replace(
            q=q, k=dense[0], v=dense[1], sink_k=of_sinks[0], sink_v=of_sinks[1], layout=x.layout
        )
        x.sums = Sums(*self.sums, page_2N, tables.start_N)
        x.lists, x.counts = (1, slots.shape[0]), (total, slots.shape[0], cache.heads)
        x.tiles = (cache.heads * x.shape.REPEATS * slots.shape[0],)
        forward(x, y=y)
        move_tokens((k, v), cache, kept, heads_G=heads_G, launch=write)
        return tables
