"""The calls that `hybrid_attention` makes of the kernels, as a function with a gradient.

With y and three numbers per query, the backward pass keeps the states before every chunk, which cost 4 KiB a token and
layer (8 key/value heads, head_dim 128, 2 x 64 features, half precision) and spare it a scan over all keys.

Importing this module needs Triton.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from lolcats.config.attention import AttentionConfig
from lolcats.ops.eight_bits import dense
from lolcats.ops.hybrid_attention.kernels.backward import backward
from lolcats.ops.hybrid_attention.kernels.forward import Outputs, States, forward
from lolcats.ops.hybrid_attention.kernels.operands import Operands
from lolcats.ops.hybrid_attention.kernels.segments import PackedGrid, Segments
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.state import HybridState, once, push_tokens

_DIFFERENTIABLE = 13  # the first of the 16 tensors of `Operands`
_INPUTS = (0, 1, 2, 11, 12)  # q, k, v and the sinks
_WEIGHTS = (4, 5, 6, 7)


@torch.compiler.disable
def triton_attention(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    state: HybridState | None,
    fresh: bool,
    cu_seqlens: Tensor | None = None,
    need_state: bool = False,
    shared: dict[Hashable, Any] | None = None,
    target_BHTD: Tensor | None = None,
) -> tuple[Tensor, HybridState | None]:
    """`hybrid_attention` for the calls that `support.supports` accepts; the same function as `chunked`.

    `fresh`: the sequences start here; `state` is then the initial one, or None for rows and without `need_state`.
    Without `need_state` none is returned.

    With a target of fresh sequences, the sum over their tokens of the output's squared errors, float32, in the place of
    the output; it has gradients of `params` alone.
    """
    batch, _, tokens, _ = q_BHTD.shape
    rows_are_sequences = cu_seqlens is None
    if fresh:
        config = config.within(tokens)
    elif cu_seqlens is None:
        cu_seqlens = once(shared, _even_borders, batch, tokens, q_BHTD.device)
        q_BHTD, k_BGTD, v_BGTD = (x.transpose(0, 1).flatten(1, 2)[None] for x in (q_BHTD, k_BGTD, v_BGTD))
    sequences = 0
    if need_state or not fresh:
        sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1

    S = z = sink_k = sink_v = base_N = layout = grid = None
    after = state
    if state is not None and (need_state or (config.sinks and not fresh)):
        after = push_tokens(state, config, k_BGTD, v_BGTD, cu_seqlens, shared=shared)
    kept = k_BGTD, v_BGTD
    k_BGTD, v_BGTD = (dense(x, q_BHTD.dtype) for x in kept)
    if fresh:
        # Nothing came before: the grid starts at the first token, and the sinks are the first of them.
        if cu_seqlens is not None:
            layout = once(shared, Segments.of_borders, cu_seqlens, tokens)
            if config.sinks:
                places = once(shared, _first_places, cu_seqlens, config.sinks, tokens)
                sink_k, sink_v = (_first_tokens(x, *places) for x in (k_BGTD, v_BGTD))
    else:
        assert state is not None
        assert after is not None
        assert cu_seqlens is not None
        grid = once(shared, PackedGrid, config, state.position, cu_seqlens, q_BHTD.shape[2])
        layout, base_N = grid.segments, grid.base_N.to(torch.int32)
        q_BHTD = grid.place(q_BHTD, None, q_BHTD.dtype)
        k_BGTD = grid.place(k_BGTD, dense(state.k, q_BHTD.dtype), k_BGTD.dtype)
        v_BGTD = grid.place(v_BGTD, dense(state.v, q_BHTD.dtype), v_BGTD.dtype)
        if config.feature_map is not None:
            S, z = state.S, state.z
        if config.sinks:
            sink_k, sink_v = (dense(x, q_BHTD.dtype).to(k_BGTD.dtype) for x in (after.sink_k, after.sink_v))

    if not config.has_softmax:
        params = params._replace(sink_logits=None)
    given = (q_BHTD, k_BGTD, v_BGTD, *params.tensors, S, z, sink_k, sink_v, base_N, *(layout or (None, None)))
    tensors = [None if x is None else _dense(x) if i in _INPUTS else x.contiguous() for i, x in enumerate(given)]
    settings = (sequences, config, params.scale_of(q_BHTD), params.softcap)
    y_BHTD, S, z = _attend(tensors, settings, None if target_BHTD is None else _dense(target_BHTD))
    if grid is not None:
        y_BHTD = grid.pick(y_BHTD)
        if rows_are_sequences:
            y_BHTD = y_BHTD[0].unflatten(1, (batch, tokens)).transpose(0, 1)
    if not need_state:
        return y_BHTD, None
    if after is None:
        after = _state_of_rows(*kept, config, q_BHTD.shape[3])
    if config.feature_map is not None:
        assert S is not None
        assert z is not None
        after = after._replace(S=S, z=z)
    return y_BHTD, after


def _state_of_rows(k_BGTD: Tensor, v_BGTD: Tensor, config: AttentionConfig, head_dim: int) -> HybridState:
    """The state after the first tokens of every row, its sums not yet filled in; of packed keys with packed windows."""
    batch, kv_heads, tokens, _ = k_BGTD.shape
    S = k_BGTD.new_empty(batch, kv_heads, 0, head_dim, dtype=torch.float32)
    k, v = (_ring(x, config.capacity) for x in (k_BGTD, v_BGTD))
    sink_k, sink_v = (_ring(x[:, :, : config.sinks], config.sinks) for x in (k_BGTD, v_BGTD))
    return HybridState(S, S.new_empty(S.shape[:3]), k, v, sink_k, sink_v, torch.full((batch,), tokens, device=S.device))


def _ring(x_BGTD: Tensor, slots: int) -> Tensor:
    """A contiguous copy of the latest tokens, each in its slot of a ring; zero where none has come."""
    tokens = x_BGTD.shape[2]
    if tokens < slots:
        return pad(x_BGTD, (0, 0, 0, slots - tokens))
    begin = tokens - tokens % max(slots, 1)  # of the last turn
    return torch.cat([x_BGTD[:, :, begin:], x_BGTD[:, :, tokens - slots : begin]], 2)


def _even_borders(sequences: int, tokens: int, device: torch.device) -> Tensor:
    """Borders of sequences of `tokens` tokens each, one after the other."""
    return torch.arange(sequences + 1, device=device) * tokens


def _first_tokens(x_1GTD: Tensor, index_NC: Tensor, exists_NC: Tensor) -> Tensor:
    """The first tokens of every sequence; zero where there are fewer."""
    return torch.where(exists_NC[:, None, :, None], x_1GTD[0].transpose(0, 1)[index_NC].transpose(1, 2), 0)


def _first_places(cu_seqlens: Tensor, count: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Where the first `count` tokens of every sequence are, and whether there are so many; [N, count]."""
    border_N1, offset_C = cu_seqlens[:, None].long(), torch.arange(count, device=cu_seqlens.device)
    return (border_N1[:-1] + offset_C).clamp_max(tokens - 1), offset_C < border_N1.diff(dim=0)


def _dense(x: Tensor) -> Tensor:
    """The kernels read rows of head_dim; any other stride is free."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _attend(
    tensors: list[Tensor | None], settings: tuple[Any, ...], target: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, or the sum of its squared errors against a target, and the final S and z, None for no sequences."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _Attention.apply(settings, target, *tensors)
    return _results(*forward(Operands.of(tensors, *settings), target=target))


def _results(out: Outputs, states: States | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return out.y if out.square is None else out.square.sum(), *((None, None) if states is None else states[2:])


class _Attention(torch.autograd.Function):
    """`_attend` with the gradients of its tensors."""

    @staticmethod
    def forward(ctx: Any, settings: tuple[Any, ...], target: Tensor | None, *tensors: Tensor | None) -> Any:
        out, states = forward(Operands.of(tensors, *settings), save=True, target=target)
        saved = out.y, out.den, out.top, out.arg, out.delta, *((None, None) if states is None else states[:2])
        ctx.save_for_backward(*saved, *tensors)
        ctx.settings, ctx.has_target = settings, target is not None
        ctx.set_materialize_grads(False)
        return _results(out, states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (y, den, top, arg, delta, S, z, *tensors), (dy, dS, dz) = ctx.saved_tensors, gradients
        needs = ctx.needs_input_grad[2:]
        factor = None
        if ctx.has_target:  # everything is linear in the gradient of y, which is 2 (y - target) times that of the sum
            dy, factor = y, 2.0 * dy
        elif dy is None:
            dy = torch.zeros_like(y)
        found = backward(
            Operands.of(tensors, *ctx.settings),
            States(S, z),
            Outputs(y, den, top, arg, delta),
            _dense(dy),
            None if dS is None else dS.contiguous(),
            None if dz is None else dz.contiguous(),
            need_inputs=any(needs[i] for i in _INPUTS),
            need_weights=any(needs[i] for i in _WEIGHTS),
        )
        grads = [grad if need else None for grad, need in zip(found, needs, strict=False)]
        if factor is not None:
            grads = [None if grad is None else grad * factor for grad in grads]
        return None, None, *grads, *[None] * (len(tensors) - _DIFFERENTIABLE)
