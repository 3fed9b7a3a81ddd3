"""The calls that `hybrid_attention` makes of the kernels: with a gradient, or with states.

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

from lolcats.config.attention import AttentionConfig
from lolcats.ops.eight_bits import pack, unpack
from lolcats.ops.hybrid_attention.kernels.backward import backward
from lolcats.ops.hybrid_attention.kernels.forward import Outputs, States, forward
from lolcats.ops.hybrid_attention.kernels.operands import Operands, Segments
from lolcats.ops.hybrid_attention.kernels.paged import PagedLayer
from lolcats.ops.hybrid_attention.state import (
    HybridParams,
    HybridState,
    Sequences,
    Tokens,
    initial_state,
    keeps_eight_bits,
    needs_gradient,
    once,
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
        tables = PagedLayer(parts, k.dtype, config, params).prefill(row, sequences, shared)
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
