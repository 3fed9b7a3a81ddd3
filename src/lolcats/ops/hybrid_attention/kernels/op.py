"""The Triton kernels as operators of torch.library, so that autograd, torch.compile, activation checkpointing
and sharding see one opaque function with a gradient; and the calls of `hybrid_attention` that run through them.

Whatever the backward pass needs of the forward pass is an output of the operator. With y and three numbers per query
these are the states before every chunk, which cost 4 KiB a token and layer until the backward pass (8 key/value heads,
head_dim 128, 2 x 64 features, half precision) and spare it a scan over all keys.

Importing this module needs Triton.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.kernels.backward import backward
from lolcats.ops.hybrid_attention.kernels.forward import Outputs, States, forward
from lolcats.ops.hybrid_attention.kernels.operands import Operands
from lolcats.ops.hybrid_attention.kernels.segments import PackedGrid, Segments
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.state import HybridState, once, push_tokens

# The settings that the operators take, as fields of `AttentionConfig`.
SETTINGS = ("window", "window_size", "window_blocks", "sinks", "feature_map", "linear_length_cap")
# Operands' fields, in its order, with the settings in the place of `config`.
_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor gamma, Tensor? q_weight, Tensor? k_weight, Tensor? q_bias, Tensor? k_bias,"
    " Tensor? sink_logits, Tensor? S, Tensor? z, Tensor? sink_k, Tensor? sink_v, Tensor? base,"
    " Tensor? table, Tensor? slots, SymInt sequences,"
    " str window, int window_size, int window_blocks, int sinks, str? feature_map, int linear_length_cap, float scale,"
    " float? softcap"
)
_TENSORS = 16  # the first arguments
_DIFFERENTIABLE = 13  # the first of these
_INPUTS = (0, 1, 2, 11, 12)  # q, k, v and the sinks
_WEIGHTS = (4, 5, 6, 7)


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
) -> tuple[Tensor, HybridState | None]:
    """`hybrid_attention` for the calls that `support.supports` accepts; the same function as `chunked`.

    `fresh`: the sequences start here; `state` is then the initial one, or None without `need_state`. Without
    `need_state` none is returned.
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
        after = push_tokens(state, config, k_BGTD, v_BGTD, cu_seqlens, fresh=fresh, shared=shared)
    if fresh:
        # Nothing came before: the grid starts at the first token, and the sinks are the first of them.
        if cu_seqlens is not None:
            layout = once(shared, Segments.of_borders, cu_seqlens, tokens)
        if config.sinks:
            sink_k, sink_v = _first_tokens(k_BGTD, v_BGTD, config.sinks, cu_seqlens)
    else:
        assert state is not None
        assert after is not None
        assert cu_seqlens is not None
        grid = once(shared, PackedGrid, config, state.position, cu_seqlens, q_BHTD.shape[2])
        layout, base_N = grid.segments, grid.base_N
        q_BHTD = grid.place(q_BHTD, None, q_BHTD.dtype)
        k_BGTD = grid.place(k_BGTD, state.k, k_BGTD.dtype)
        v_BGTD = grid.place(v_BGTD, state.v, v_BGTD.dtype)
        if config.feature_map is not None:
            S, z = state.S, state.z
        if config.sinks:
            sink_k, sink_v = after.sink_k.to(k_BGTD.dtype), after.sink_v.to(v_BGTD.dtype)

    before = (S, z, sink_k, sink_v)
    tensors = _tensors(q_BHTD, k_BGTD, v_BGTD, config, params, before, base_N, layout)
    scoring = params.scale_of(q_BHTD), params.softcap
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if save or torch.compiler.is_compiling():
        y_BHTD, S, z, *_ = hybrid_attention_op(*_arguments(tensors, sequences, config, *scoring), None, save)
    else:
        out, states = forward(Operands.of(tensors, sequences, config, *scoring))
        y_BHTD = out.y
        S, z = (None, None) if states is None else states[2:]
    if grid is not None:
        y_BHTD = grid.pick(y_BHTD)
        if rows_are_sequences:
            y_BHTD = y_BHTD[0].unflatten(1, (batch, tokens)).transpose(0, 1)
    if not need_state:
        return y_BHTD, None
    if config.feature_map is not None:
        assert after is not None
        assert S is not None
        assert z is not None
        after = replace(after, S=S, z=z)
    return y_BHTD, after


def triton_squared_error(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    target_BHTD: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Sum of squared errors over the real tokens of fresh sequences, float32; gradients of `params` only."""
    config = config.within(q_BHTD.shape[2])
    layout = None if cu_seqlens is None else Segments.of_borders(cu_seqlens, q_BHTD.shape[2])
    sinks = _first_tokens(k_BGTD, v_BGTD, config.sinks, cu_seqlens) if config.sinks else (None, None)
    tensors = _tensors(q_BHTD, k_BGTD, v_BGTD, config, params, (None, None, *sinks), None, layout)
    arguments = _arguments(tensors, 0, config, params.scale_of(q_BHTD), params.softcap)
    return hybrid_attention_op(*arguments, _dense(target_BHTD), True)[-1]


def _even_borders(sequences: int, tokens: int, device: torch.device) -> Tensor:
    """Borders of sequences of `tokens` tokens each, one after the other."""
    return torch.arange(sequences + 1, device=device) * tokens


def _tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    before: tuple[Tensor | None, ...],
    base: Tensor | None,
    layout: Segments | None,
) -> tuple[Tensor | None, ...]:
    """The operators' tensors, in their order, as `Operands` has them; `before` is S, z, sink_k, sink_v."""
    table, slots = (None, None) if layout is None else (layout.table, layout.slots)
    if not config.has_softmax:
        params = params._replace(sink_logits=None)
    base = None if base is None else base.to(torch.int32)
    return tuple(
        None if x is None else _dense(x) if i in _INPUTS else x.contiguous()
        for i, x in enumerate((q, k, v, *params.tensors, *before, base, table, slots))
    )


def _arguments(
    tensors: tuple[Tensor | None, ...], sequences: int, config: AttentionConfig, scale: float, softcap: float | None
) -> tuple:
    """The operators' first arguments."""
    return *tensors, sequences, *(getattr(config, name) for name in SETTINGS), scale, softcap


def _first_tokens(k_BGTD: Tensor, v_BGTD: Tensor, count: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values of the first tokens of every sequence; zero where there are fewer."""
    if cu_seqlens is None:
        return k_BGTD[:, :, :count], v_BGTD[:, :, :count]
    border_N1, offset_C = cu_seqlens[:, None].long(), torch.arange(count, device=cu_seqlens.device)
    exists = (offset_C < border_N1.diff(dim=0))[:, None, :, None]
    index_NC = (border_N1[:-1] + offset_C).clamp_max(k_BGTD.shape[2] - 1)
    k_NGCD, v_NGCD = (x[0].transpose(0, 1)[index_NC].transpose(1, 2) for x in (k_BGTD, v_BGTD))
    return torch.where(exists, k_NGCD, 0), torch.where(exists, v_NGCD, 0)


def _dense(x: Tensor) -> Tensor:
    """The kernels read rows of head_dim; any other stride is free."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _operands(arguments: tuple) -> Operands:
    """From the operators' first arguments; see `Operands.of`."""
    tensors, (sequences, *settings, scale, softcap) = arguments[:_TENSORS], arguments[_TENSORS:]
    return Operands.of(tensors, sequences, config_of(*settings), scale, softcap)


@cache
def config_of(*settings: Any) -> AttentionConfig:
    """The settings that the operators take, as one object."""
    return AttentionConfig(**dict(zip(SETTINGS, settings, strict=True)))


@torch.library.custom_op(
    "lolcats::hybrid_attention",
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor? target, bool save) -> (" + ", ".join(["Tensor"] * 10) + ")",
)
def hybrid_attention_op(*arguments):
    """y, the final S and z; with `save` den, top and arg of `Outputs`, and S and z of `States`; with a target, whose
    error y is then, delta and the sum of all squares. Empty tensors for what there is not."""
    *first, target, save = arguments
    x = _operands(tuple(first))
    out, states = forward(x, save=save, target=target)
    return _results(x, out, states, save=save)


def _results(x: Operands, out: Outputs, states: States | None, *, save: bool) -> tuple[Tensor, ...]:
    S, z, *ends = states or (None,) * 4
    square = None if out.square is None else out.square.sum()
    found = (out.y, *ends, out.den, out.top, out.arg, *((S, z) if save else (None, None)), out.delta, square)
    return tuple(x.q.new_empty(0, dtype=torch.float32) if result is None else result for result in found)


@hybrid_attention_op.register_fake
def _(*arguments):
    *first, target, save = arguments
    x = _operands(tuple(first))
    out = Outputs.empty(x, save=save, error=target is not None)
    return _results(x, out, States.empty(x) if x.is_linear else None, save=save)


@torch.library.custom_op(
    "lolcats::hybrid_attention_backward",
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor dy, Tensor? dS, Tensor? dz, Tensor y, Tensor den, Tensor top, Tensor arg,"
    " Tensor prefix_S, Tensor prefix_z, Tensor? delta, bool need_inputs, bool need_weights)"
    " -> (" + ", ".join(["Tensor"] * _DIFFERENTIABLE) + ")",
)
def hybrid_attention_backward_op(*arguments):
    """What `backward` returns, with empty tensors in place of None."""
    dy, dS, dz, y, den, top, arg, prefix_S, prefix_z, delta, need_inputs, need_weights = arguments[-12:]
    grads = backward(
        _operands(arguments[:-12]),
        States(prefix_S, prefix_z),
        Outputs(y, den, top, arg, delta),
        _dense(dy),
        None if dS is None else dS.contiguous(),
        None if dz is None else dz.contiguous(),
        need_inputs=need_inputs,
        need_weights=need_weights,
    )
    return tuple(y.new_empty(0) if grad is None else grad for grad in grads)


@hybrid_attention_backward_op.register_fake
def _(*arguments):
    need_inputs, need_weights = arguments[-2:]
    needs = [need_weights if i in _WEIGHTS else need_inputs or i not in _INPUTS for i in range(_DIFFERENTIABLE)]
    formats = [torch.preserve_format] * 3 + [torch.contiguous_format] * (_DIFFERENTIABLE - 3)
    return tuple(
        torch.empty_like(x, memory_format=form) if need and x is not None else arguments[0].new_empty(0)
        for x, need, form in zip(arguments[:_DIFFERENTIABLE], needs, formats, strict=True)
    )


def _save(ctx, inputs, output):
    y, _, _, *saved, _ = output
    ctx.save_for_backward(*inputs[:_TENSORS], y, *saved)
    *ctx.settings, target, _ = inputs[_TENSORS:]
    ctx.has_target = target is not None
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dS, dz, *others):
    tensors, (y, *saved, delta) = ctx.saved_tensors[:_TENSORS], ctx.saved_tensors[_TENSORS:]
    needs = ctx.needs_input_grad
    need_inputs, need_weights = any(needs[i] for i in _INPUTS), any(needs[i] for i in _WEIGHTS)
    factor = None
    if ctx.has_target:  # everything is linear in the gradient of y, which is 2 (y - target) times that of the sum
        dy, factor = y, 2.0 * others[-1]
    elif dy is None:
        dy = torch.zeros_like(y)
    delta = delta if ctx.has_target else None
    further = (dy, dS, dz, y, *saved, delta, need_inputs, need_weights)
    grads = hybrid_attention_backward_op(*tensors, *ctx.settings, *further)
    grads = [grad if need and grad.numel() > 0 else None for grad, need in zip(grads, needs, strict=False)]
    if factor is not None:
        grads = [None if grad is None else grad * factor for grad in grads]
    return (*grads, *[None] * (len(needs) - _DIFFERENTIABLE))


hybrid_attention_op.register_autograd(_backward, setup_context=_save)
