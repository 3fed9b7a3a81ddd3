"""The calls that `hybrid_attention` makes of the kernels: with a gradient, or with states.

With y and three numbers per query, the backward pass keeps the states before every chunk, which cost 4 KiB a token and
layer (8 key/value heads, head_dim 128, 2 x 64 features, half precision) and spare it a scan over all keys.

Importing this module needs Triton.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from lolcats.config.attention import AttentionConfig
from lolcats.ops.eight_bits import pack, unpack
from lolcats.ops.hybrid_attention.kernels.backward import backward
from lolcats.ops.hybrid_attention.kernels.forward import Outputs, States, forward
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
    Sequences,
    Tokens,
    initial_state,
    keeps_eight_bits,
    needs_gradient,
    once,
    ring_positions,
)

# Of the tensors of `Operands`: q, k, v and the sinks; the feature maps'.
_INPUTS = (0, 1, 2, 9, 10)
_WEIGHTS = (4, 5, 6, 7)


@torch.compiler.disable
def triton_attention(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    cu_seqlens: Tensor | None = None,
    shared: dict[Hashable, Any] | None = None,
    target_BHTD: Tensor | None = None,
) -> Tensor:
    """`hybrid_attention` of whole sequences, for the calls that `api.supports` accepts; as `chunked` computes it.

    With a target, the sum over their tokens of the output's squared errors, float32, in the place of the output; it has
    gradients of `params` alone.
    """
    tokens, packed = q_BHTD.shape[2], keeps_eight_bits(config, None, q_BHTD, k_BGTD, v_BGTD)
    config = config.within(tokens)
    if packed:
        k_BGTD, v_BGTD = (unpack(pack(x), q_BHTD.dtype) for x in (k_BGTD, v_BGTD))
    sink_k = sink_v = layout = None
    if cu_seqlens is not None:
        layout = once(shared, Segments.of_borders, cu_seqlens, tokens)
        if config.sinks:
            index_NC = once(shared, _first_tokens, cu_seqlens, config.sinks)
            sink_k, sink_v = (x[0].transpose(0, 1)[index_NC].transpose(1, 2) for x in (k_BGTD, v_BGTD))
    if not config.has_softmax:
        params = params._replace(sink_logits=None)
    given = (q_BHTD, k_BGTD, v_BGTD, *params.tensors, sink_k, sink_v, *(layout or (None, None)))
    tensors = [None if x is None else _dense(x) if i in _INPUTS else x.contiguous() for i, x in enumerate(given)]
    settings = (config, params.scale_of(q_BHTD), params.softcap)
    target_BHTD = None if target_BHTD is None else _dense(target_BHTD)
    if needs_gradient(*tensors):
        return _Attention.apply(settings, target_BHTD, *tensors)
    out, _ = forward(Operands(tensors, *settings), target=target_BHTD)
    return out.y if out.square is None else out.square.sum()


@torch.compiler.disable
def triton_with_state(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    state: HybridState | None,
    cu_seqlens: Tensor | None = None,
    shared: dict[Hashable, Any] | None = None,
) -> tuple[Tensor, HybridState]:
    """`hybrid_attention` with `return_state`, for the same calls; without gradients."""
    (batch, _, tokens, _), fresh = q_BHTD.shape, state is None
    if state is None:
        packed = keeps_eight_bits(config, state, q_BHTD, k_BGTD, v_BGTD)
        state = initial_state(config, params, k_BGTD, cu_seqlens, packed=packed, cleared=False)
        config = config.within(tokens)
    else:
        state = state.map(lambda x: x.detach().clone(memory_format=torch.contiguous_format))
    page_N, border_N = once(shared, _numbers, q_BHTD.device, len(state.position), batch, tokens)
    q, k, v = (_dense(x.detach()).transpose(1, 2).flatten(0, 1) for x in (q_BHTD, k_BGTD, v_BGTD))
    y = torch.empty_like(q) if cu_seqlens is None else torch.zeros_like(q)  # zeros for padding
    row, cu_seqlens = Tokens(q, k, v, y), border_N if cu_seqlens is None else cu_seqlens
    sequences = Sequences((page_N, page_N), state.position, cu_seqlens, (0,) * len(page_N) if fresh else None)
    parts = {name: x.unflatten(1, (k.shape[1], -1)) for name, x in state._asdict().items() if name != "position"}
    with torch.no_grad():
        tables = Prompts(parts, k.dtype, config, params)(row, sequences, shared)
    y_BHTD = row.y_NHD.unflatten(0, (batch, tokens)).transpose(1, 2)
    return y_BHTD, state._replace(position=state.position + tables.length_N)


def _numbers(device: torch.device, sequences: int, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Those of the sequences, and the borders of even rows."""
    number_N = torch.arange(max(sequences, batch + 1), device=device)
    return number_N[:sequences], number_N[: batch + 1] * tokens


def _first_tokens(cu_seqlens: Tensor, count: int) -> Tensor:
    """Which the first `count` tokens of every sequence are, [N, count]; where there are fewer some other's, unseen."""
    index_NC = cu_seqlens[:-1, None].long() + torch.arange(count, device=cu_seqlens.device)
    return torch.minimum(index_NC, cu_seqlens[-1] - 1).clamp_min(0)


def _dense(x: Tensor) -> Tensor:
    """The kernels read rows of head_dim; any other stride is free."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Attention(torch.autograd.Function):
    """y, or the sum of its squared errors against a target, with the gradients of the tensors."""

    @staticmethod
    def forward(ctx: Any, settings: tuple[Any, ...], target: Tensor | None, *tensors: Tensor | None) -> Any:
        out, states = forward(Operands(tensors, *settings), save=True, target=target)
        saved = out.y, out.den, out.top, out.arg, out.delta, *((None, None) if states is None else states[:2])
        ctx.save_for_backward(*saved, *tensors)
        ctx.settings, ctx.has_target = settings, target is not None
        return out.y if out.square is None else out.square.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        y, den, top, arg, delta, S, z, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        factor = None
        if ctx.has_target:  # everything is linear in the gradient of y, which is 2 (y - target) times that of the sum
            dy, factor = y, 2.0 * dy
        found = backward(
            Operands(tensors, *ctx.settings),
            States(S, z),
            Outputs(y, den, top, arg, delta),
            _dense(dy),
            need_inputs=any(needs[i] for i in _INPUTS),
            need_weights=any(needs[i] for i in _WEIGHTS),
        )
        grads = [grad if need else None for grad, need in zip(found, needs, strict=False)]
        if factor is not None:
            grads = [None if grad is None else grad * factor for grad in grads]
        return None, None, *grads, None, None  # of the layout


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


class Prompts:
    """Outputs of sequences in one layer, whose states are read and written where they lie; without autograd.

    Five launches a call: keys and values, rounded as they are kept, behind those of the rings; three of `forward`; and
    what is kept of the new ones. A sixth copies rings inside of sequences that were cut. Which token goes where is the
    same in all layers: `Tables`, made once for a pass. Nothing waits for the device, and of a short prompt the host is
    the bottleneck: what kernels take of a layer in each call is made here, once.

    Args:
        parts: the views of `pages.StatePages`.
        dtype: of queries, keys and values.
    """

    def __init__(
        self, parts: dict[str, Tensor], dtype: torch.dtype, config: AttentionConfig, params: HybridParams
    ) -> None:
        if not config.has_softmax:
            params = params._replace(sink_logits=None)
        keys, values, *sinks = (parts[name][:, :, 0] for name in ("k", "v", "sink_k", "sink_v"))
        self.cache = Cache.of(keys, values, *[sinks] * (config.sinks > 0))
        sizes = len(params.window_factor), self.cache.heads
        q, k = (parts["S"].new_empty(1, heads, 0, self.cache.width, dtype=dtype) for heads in sizes)
        own = (None if x is None else x.contiguous() for x in params.tensors)
        self.operands = Operands((q, k, k, *own, None, None, None, None), config, params.scale_of(q), params.softcap)
        self.operands.sinks_there = config.sinks
        self.inputs, _, _ = self.operands.inputs, self.operands.shape, self.operands.wide
        self.sums = rows(parts["S"]), rows(parts["z"])
        self.launches = Launches()

    def __call__(self, tokens: Tokens, sequences: Sequences, shared: dict[Hashable, Any] | None = None) -> Tables:
        """Of N sequences in a row. `shared`: see `hybrid_attention`."""
        page_2N, position_N = sequences[:2]
        x, cache, heads_G, sinks = copy(self.operands), self.cache, tokens.heads_G, self.operands.config.sinks
        count, (total, _, width) = position_N.shape[0], tokens.k_NGD.shape
        tables = once(shared, Tables, x.config, *sequences[1:], total)
        seen, kept = (moves._replace(page_2N=page_2N) for moves in (tables.seen, tables.kept))
        near = [tokens.k_NGD.new_empty(seen.source.shape[0], cache.heads, width) for _ in range(2)]
        q, k, v, y, *dense = map(token_rows, (*tokens[:4], *near))
        key = alike(*tokens[:4], *page_2N)
        read, keep, x.launch, write = (partial(self.launches, (key, i)) for i in range(4))
        move_tokens((k, v), cache, seen, dense=dense, heads_G=heads_G, launch=read)
        if sequences.cut:
            move_tokens((NO_ROWS, NO_ROWS), cache, kept, heads_G=heads_G, launch=keep)

        row = cache.heads * width
        first = seen.source.shape[0] - count * sinks
        of_sinks = [Rows(rest[first:], sinks * row, width, row) if sinks else NO_ROWS for rest in near]
        table, slots = tables.segments
        # As many heads as of keys; which ones, the kernel looks up.
        x.layout = Layout(tables.base_N, table, slots, tables.query_N2, heads_G)
        x.sums = Sums(*self.sums, page_2N, tables.start_N)
        x.inputs = self.inputs._replace(
            q=q, k=dense[0], v=dense[1], sink_k=of_sinks[0], sink_v=of_sinks[1], layout=x.layout
        )
        x.lists, x.counts = (1, slots.shape[0]), (total, slots.shape[0], cache.heads)
        x.tiles = (cache.heads * x.shape.REPEATS * slots.shape[0],)
        forward(x, y=y)
        move_tokens((k, v), cache, kept, heads_G=heads_G, launch=write)
        return tables
