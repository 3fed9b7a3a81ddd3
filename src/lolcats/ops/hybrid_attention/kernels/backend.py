"""Hybrid attention through Triton kernels; the same function as `chunked`, for the calls that
`support.supports` accepts. Importing this module needs Triton."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lolcats.ops.hybrid_attention.chunked import _Grid
from lolcats.ops.hybrid_attention.kernels.op import hybrid_attention_error_op
from lolcats.ops.hybrid_attention.kernels.op import hybrid_attention_op
from lolcats.ops.hybrid_attention.spec import HybridParams
from lolcats.ops.hybrid_attention.spec import HybridSpec
from lolcats.ops.hybrid_attention.state import HybridState
from lolcats.ops.hybrid_attention.state import push_tokens


def triton_attention(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    spec: HybridSpec,
    params: HybridParams,
    *,
    scale: float,
    softcap: float | None = None,
    state: HybridState | None,
    fresh: bool = True,
    length_B: Tensor | None = None,
    need_state: bool = True,
) -> tuple[Tensor, HybridState | None]:
    """See `hybrid_attention`; token t of sequence b is real iff t < length_B[b] (None: all are).

    Without `need_state` a fresh state may be None, and what is returned in its place is meaningless.
    """
    assert softcap is None
    tokens = q_BHTD.shape[2]
    after = state
    if state is not None and (need_state or (spec.sinks and not fresh)):
        after = push_tokens(state, spec, k_BGTD, v_BGTD, length_B)
    S = z = sink_k = sink_v = base_B = grid = None
    if fresh:
        # Nothing came before: entry t of the grid is token t, and the sinks are the first of them.
        if spec.sinks:
            sink_k, sink_v = k_BGTD[:, :, : spec.sinks], v_BGTD[:, :, : spec.sinks]
        limit_B = length_B
    else:
        assert state is not None
        assert after is not None
        grid = _Grid(spec, state, tokens, fresh=False)
        q_BHTD = grid.place(q_BHTD, None, q_BHTD.dtype)
        k_BGTD = grid.place(k_BGTD, state.k, k_BGTD.dtype)
        v_BGTD = grid.place(v_BGTD, state.v, v_BGTD.dtype)
        limit_B = grid.prior_B + (tokens if length_B is None else length_B)
        base_B = grid.base_B
        if spec.feature_map is not None:
            S, z = state.S, state.z
        if spec.sinks:
            sink_k, sink_v = after.sink_k.to(k_BGTD.dtype), after.sink_v.to(v_BGTD.dtype)

    inputs = (
        *(_dense(x) for x in (q_BHTD, k_BGTD, v_BGTD)),
        *(None if x is None else x.contiguous() for x in params[:5]),
        *(None if x is None else x.contiguous() for x in (S, z)),
        *(None if x is None else _dense(x) for x in (sink_k, sink_v)),
        *(None if x is None else x.to(torch.int32) for x in (limit_B, base_B)),
    )
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    y_BHTD, S, z, _, _, _ = hybrid_attention_op(
        *inputs, spec.window, spec.window_size, spec.blocks, spec.sinks, spec.feature_map, scale, save
    )
    if grid is not None:
        y_BHTD = grid.pick(y_BHTD)
    if need_state and spec.feature_map is not None:
        assert after is not None
        after = replace(after, S=S, z=z)
    return y_BHTD, after


def triton_squared_error(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    target_BHTD: Tensor,
    spec: HybridSpec,
    params: HybridParams,
    *,
    scale: float,
    length_B: Tensor | None,
) -> Tensor:
    """Sum of squared errors over the real tokens of fresh sequences, float32; gradients of `params` only."""
    sinks = [_dense(x[:, :, : spec.sinks]) for x in (k_BGTD, v_BGTD)] if spec.sinks else [None, None]
    return hybrid_attention_error_op(
        *(_dense(x) for x in (q_BHTD, k_BGTD, v_BGTD)),
        *(None if x is None else x.contiguous() for x in params[:5]),
        *(None, None, *sinks),
        *(None if length_B is None else length_B.to(torch.int32), None),
        *(spec.window, spec.window_size, spec.blocks, spec.sinks, spec.feature_map, scale),
        _dense(target_BHTD),
    )[0]


def _dense(x: Tensor) -> Tensor:
    """The kernels read rows of head_dim; any other stride is free."""
    return x if x.stride(-1) == 1 else x.contiguous()
