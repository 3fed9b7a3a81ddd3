"""Hybrid attention through Triton kernels; the same function as `chunked`, for the calls that
`support.supports` accepts. Importing this module needs Triton."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.grid import Grid
from lolcats.ops.hybrid_attention.kernels import segments
from lolcats.ops.hybrid_attention.kernels.op import hybrid_attention_error_op, hybrid_attention_op
from lolcats.ops.hybrid_attention.kernels.packed_grid import PackedGrid
from lolcats.ops.hybrid_attention.kernels.segments import Segments
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.ragged import rows_from_mask
from lolcats.ops.hybrid_attention.remember import remembered
from lolcats.ops.hybrid_attention.state import HybridState, push_tokens, take_tokens


def triton_attention(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    *,
    scale: float,
    state: HybridState | None,
    fresh: bool,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    need_state: bool = False,
) -> tuple[Tensor, HybridState | None]:
    """See `hybrid_attention`. `fresh`: the sequences start here; `state` is then the initial one, or None
    without `need_state`. What is returned in its place without `need_state` is meaningless."""
    tokens = q_BHTD.shape[2]
    if fresh:
        spec = spec.within(tokens)
    sequences = len(state.position) if state is not None and (need_state or not fresh) else 0
    S = z = sink_k = sink_v = length_B = base_B = None
    rows = layout = place = None
    grid: Grid | PackedGrid | None = None
    if segment_ids is not None:
        layout = segments.of_ids(segment_ids)
    elif cu_seqlens is not None:
        layout = segments.of_borders(cu_seqlens, tokens)
    elif mask is not None:
        layout = segments.of_mask(mask) if fresh else None
        if layout is None:
            rows = remembered(rows_from_mask, mask)
            q_BHTD, k_BGTD, v_BGTD = rows.align(q_BHTD), rows.align(k_BGTD), rows.align(v_BGTD)
            length_B = rows.length_N
    if layout is not None and sequences:
        *place, length_B = layout.places(sequences)

    after = state
    if state is not None and (need_state or (spec.sinks and not fresh)):
        after = push_tokens(state, spec, k_BGTD, v_BGTD, length_B, place, fresh=fresh)
    if fresh:
        # Nothing came before: the grid starts at the first token, and the sinks are the first of them.
        if spec.sinks:
            sink_k, sink_v = _first_tokens(k_BGTD, v_BGTD, spec.sinks, layout)
        limit_B = None if layout is not None else length_B
    else:
        assert state is not None
        assert after is not None
        if cu_seqlens is not None:
            grid = packed = PackedGrid(spec, state, cu_seqlens, tokens)
            layout, limit_B, base_B = packed.segments, None, packed.base_B
        else:
            grid, limit_B, base_B = remembered(_padded_grid, spec, state.position, length_B, tokens)
        q_BHTD = grid.place(q_BHTD, None, q_BHTD.dtype)
        k_BGTD = grid.place(k_BGTD, state.k, k_BGTD.dtype)
        v_BGTD = grid.place(v_BGTD, state.v, v_BGTD.dtype)
        if spec.feature_map is not None:
            S, z = state.S, state.z
        if spec.sinks:
            sink_k, sink_v = after.sink_k.to(k_BGTD.dtype), after.sink_v.to(v_BGTD.dtype)

    inputs = _operands(
        q_BHTD, k_BGTD, v_BGTD, spec, params, scale, layout, (S, z, sink_k, sink_v), (limit_B, base_B), sequences
    )
    save = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    y_BHTD, S, z, *_ = hybrid_attention_op(*inputs, save)
    if grid is not None:
        y_BHTD = grid.pick(y_BHTD)
    if rows is not None:
        y_BHTD = rows.restore(y_BHTD)
    if need_state and spec.feature_map is not None:
        assert after is not None
        after = replace(after, S=S, z=z)
    return y_BHTD, after


def triton_squared_error(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    target_BHTD: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    *,
    scale: float,
    mask: Tensor | None,
    segment_ids: Tensor | None,
) -> Tensor:
    """Sum of squared errors over the real tokens of fresh sequences, float32; gradients of `params` only."""
    spec = spec.within(q_BHTD.shape[2])
    layout = length_B = None
    if segment_ids is not None:
        layout = segments.of_ids(segment_ids)
    elif mask is not None:
        layout = segments.of_mask(mask)
        if layout is None:
            rows = remembered(rows_from_mask, mask)
            length_B = rows.length_N
            q_BHTD, k_BGTD, v_BGTD, target_BHTD = (rows.align(x) for x in (q_BHTD, k_BGTD, v_BGTD, target_BHTD))
    sinks = _first_tokens(k_BGTD, v_BGTD, spec.sinks, layout) if spec.sinks else (None, None)
    inputs = _operands(q_BHTD, k_BGTD, v_BGTD, spec, params, scale, layout, (None, None, *sinks), (length_B, None), 0)
    return hybrid_attention_error_op(*inputs, _dense(target_BHTD))[0]


def _padded_grid(
    spec: AttentionConfig, position_B: Tensor, length_B: Tensor | None, tokens: int
) -> tuple[Grid, Tensor, Tensor]:
    """The grid of sequences that go on, and their entries' end and base as kernels want them."""
    grid = Grid(spec, position_B, tokens, fresh=False)
    limit_B = grid.prior_B + (tokens if length_B is None else length_B)
    return grid, limit_B.to(torch.int32), grid.base_B.to(torch.int32)


def _operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    scale: float,
    layout: Segments | None,
    before: tuple[Tensor | None, ...],
    grid: tuple[Tensor | None, ...],
    sequences: int,
) -> tuple:
    """The operators' first arguments; `before` is S, z, sink_k, sink_v, and `grid` length and base."""
    S, z, sink_k, sink_v = before
    return (
        *(_dense(x) for x in (q, k, v)),
        *(None if x is None else x.contiguous() for x in (*params[:5], S, z)),
        *(None if x is None else _dense(x) for x in (sink_k, sink_v)),
        *(None if x is None else x.to(torch.int32) for x in grid),
        *((None, None) if layout is None else (layout.table, layout.slots)),
        *(
            sequences,
            spec.window,
            spec.window_size,
            spec.window_blocks,
            spec.sinks,
            spec.feature_map,
            spec.linear_length_cap,
            scale,
        ),
    )


def _first_tokens(k_BGTD: Tensor, v_BGTD: Tensor, count: int, layout: Segments | None) -> tuple[Tensor, Tensor]:
    """Keys and values of the first tokens of every sequence; zero where there are fewer."""
    if layout is None:
        return k_BGTD[:, :, :count], v_BGTD[:, :, :count]
    row_N, start_N, length_N = layout.places()
    offset_NC = torch.arange(count, device=row_N.device).expand(len(row_N), -1)
    exists = (offset_NC < length_N[:, None])[:, None, :, None]
    k_NGCD, v_NGCD = (take_tokens(x, (row_N, start_N), offset_NC) for x in (k_BGTD, v_BGTD))
    return torch.where(exists, k_NGCD, 0), torch.where(exists, v_NGCD, 0)


def _dense(x: Tensor) -> Tensor:
    """The kernels read rows of head_dim; any other stride is free."""
    return x if x.stride(-1) == 1 else x.contiguous()
