"""Many tokens of several sequences at once, without autograd; rings and sinks are written where they lie.

Five launches a layer: keys and values, rounded as they are kept, behind those of the rings; three of `forward`; and
what is kept of the new ones. A sixth copies rings inside of sequences that were cut. Which token goes where is the same
in all layers: `Tables`, made once for a pass.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.kernels.forward import forward
from lolcats.ops.hybrid_attention.kernels.operands import Layout, Operands, Sums
from lolcats.ops.hybrid_attention.kernels.segments import Segments
from lolcats.ops.hybrid_attention.kernels.store_tokens import Moves, store_tokens
from lolcats.ops.hybrid_attention.pages import Sequences, Tokens
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.state import once, ring_positions


class Tables:
    """Which token goes where, of `pages.Sequences` in a row of T tokens.

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
        from_N: Any,
        page_N: Any,
        position_N: Any,
        cu_seqlens: Any,
        seen: Any,
        tokens: int,
    ) -> None:
        count, capacity, device = len(position_N), config.capacity, position_N.device
        border_N = cu_seqlens.long().clamp(0, tokens)
        self.length_N = border_N.diff()
        end_N, is_cut_N = position_N + self.length_N, from_N != page_N
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


def prefill(
    tokens: Tokens,
    config: AttentionConfig,
    params: HybridParams,
    *,
    sequences: Sequences,
    parts: dict[str, Tensor],
    shared: dict[Hashable, Any] | None = None,
) -> Tables:
    """Outputs of N sequences, whose states are read and written where they lie. Nothing waits for the device.

    Args:
        parts: the views of `pages.StatePages`.
        shared: see `hybrid_attention`.
    """
    page_2N, position_N, *borders, _ = sequences
    q_THD, k_TGD, v_TGD, y_THD, heads_G = tokens
    tables = once(shared, Tables, config, *page_2N, position_N, *borders, len(q_THD))
    count, entries = len(position_N), len(tables.seen.source) - len(position_N) * config.sinks
    keys, values, heads = parts["k"][:, :, 0], parts["v"][:, :, 0], parts["k"].shape[1]
    new, sink = (k_TGD[:, :, None], v_TGD[:, :, None]), (parts["sink_k"][:, :, 0], parts["sink_v"][:, :, 0])
    memory = k_TGD.new_empty(2, entries + count * config.sinks, heads, 1, k_TGD.shape[2])
    places: dict[str, Any] = {"sinks": sink if config.sinks else None, "heads_G": heads_G}
    seen, kept = (x._replace(page_2N=page_2N) for x in (tables.seen, tables.kept))
    store_tokens(*new, keys, values, seen, dense=(memory[0], memory[1]), **places)
    if sequences.keeps_old:
        store_tokens(None, None, keys, values, kept, **places)

    k, v = memory[:, :entries, :, 0].transpose(1, 2)[:, None]
    # As many heads as of keys; which ones, the kernel looks up.
    q, y = (x[:, : x.shape[1] // k_TGD.shape[1] * heads].transpose(0, 1)[None] for x in (q_THD, y_THD))
    sinks = memory[:, entries:, :, 0].unflatten(1, (count, -1)).transpose(2, 3) if config.sinks else (None, None)
    if not config.has_softmax:
        params = params._replace(sink_logits=None)
    own = (None if x is None else x.contiguous() for x in (params.gamma, *params.tensors[1:]))
    segments, sums = tables.segments, Sums(parts["S"], parts["z"], page_2N, tables.start_N)
    layout = Layout(tables.base_N, segments.table, segments.slots, tables.query_N2, heads_G)
    tensors = q, k, v, *own, *sinks
    forward(Operands(tensors, config, params.scale_of(q), params.softcap, layout, sums), y=y)
    store_tokens(*new, keys, values, kept, **places)
    return tables
