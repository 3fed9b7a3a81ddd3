"""The Triton kernels as operators of torch.library, so that autograd, torch.compile, activation checkpointing
and sharding see one opaque function with a gradient.

Whatever the backward pass needs of the forward pass is an output of the operator. With y and three numbers per query
these are the states before every chunk, which cost 4 KiB a token and layer until the backward pass (8 key/value heads,
head_dim 128, 2 x 64 features, half precision) and spare it a scan over all keys.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.kernels.backward import backward
from lolcats.ops.hybrid_attention.kernels.operands import Operands
from lolcats.ops.hybrid_attention.kernels.outputs import Outputs, attend
from lolcats.ops.hybrid_attention.kernels.states import States, chunk_states

# Operands' fields, in its order, with `spec` written out.
_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor gamma, Tensor? q_weight, Tensor? k_weight, Tensor? q_bias, Tensor? k_bias,"
    " Tensor? S, Tensor? z, Tensor? sink_k, Tensor? sink_v, Tensor? length, Tensor? base,"
    " Tensor? table, Tensor? slots, SymInt sequences,"
    " str window, int window_size, int window_blocks, int sinks, str? feature_map, int linear_length_cap, float scale"
)
_SPEC = ("window", "window_size", "window_blocks", "sinks", "feature_map", "linear_length_cap")
TENSORS = 16  # the first arguments
DIFFERENTIABLE = 12  # the first of these
_INPUTS = (0, 1, 2, 10, 11)  # q, k, v and the sinks
_WEIGHTS = (4, 5, 6, 7)


def _operands(*arguments: Any) -> Operands:
    sequences, *spec, scale = arguments[TENSORS:]
    return Operands(*[*arguments[:TENSORS], sequences, _config(*spec), scale])


@cache
def _config(*spec: Any) -> AttentionConfig:
    return AttentionConfig(**dict(zip(_SPEC, spec, strict=True)))


@torch.library.custom_op(
    "lolcats::hybrid_attention",
    mutates_args=(),
    schema=f"({_OPERANDS}, bool save) -> (" + ", ".join(["Tensor"] * 8) + ")",
)
def hybrid_attention_op(*arguments):
    """y, the final S and z, and (with `save`) den, top and arg of `Outputs` and the prefixes of `States`."""
    x, save = _operands(*arguments[:-1]).with_small_weights(), arguments[-1]
    if x.spec.feature_map is None:
        states, S, z = None, x.gamma.new_empty(0), x.gamma.new_empty(0)
    else:
        states = chunk_states(x)
        S, z = states.final_S, states.final_z
    out = attend(x, states, save=save)
    return out.y, S, z, out.den, out.top, out.arg, *_prefixes(x, states if save else None)


def _prefixes(x: Operands, states: States | None) -> tuple[Tensor, Tensor]:
    """prefix_S and prefix_z of the states; empty without."""
    if states is None:
        return x.q.new_empty(0, dtype=x.state_dtype), x.q.new_empty(0, dtype=torch.float32)
    return states.prefix_S, states.prefix_z


def _fake_prefixes(x: Operands, *, save: bool) -> tuple[Tensor, Tensor]:
    """Tensors without data like those of `_prefixes`."""
    if not save or x.spec.feature_map is None:
        return _prefixes(x, None)
    shape = (x.chunk_rows, x.state_heads, x.chunks, x.features)
    return x.q.new_empty(*shape, x.head_dim, dtype=x.state_dtype), x.q.new_empty(shape, dtype=torch.float32)


@hybrid_attention_op.register_fake
def _(*arguments):
    x, save = _operands(*arguments[:-1]), arguments[-1]
    if x.spec.feature_map is None:
        S, z = x.gamma.new_empty(0), x.gamma.new_empty(0)
    else:
        S = x.q.new_empty(x.sequences, x.state_heads, x.features, x.head_dim, dtype=torch.float32)
        z = x.q.new_empty(x.sequences, x.state_heads, x.features, dtype=torch.float32)
    rows = (x.batch, x.heads, x.tokens if save else 0)
    den, top = (x.q.new_empty(rows, dtype=torch.float32) for _ in range(2))
    arg = x.q.new_empty(rows, dtype=torch.int32)
    return torch.empty_like(x.q), S, z, den, top, arg, *_fake_prefixes(x, save=save)


@torch.library.custom_op(
    "lolcats::hybrid_attention_backward",
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor dy, Tensor? dS, Tensor? dz, Tensor y, Tensor den, Tensor top, Tensor arg,"
    " Tensor prefix_S, Tensor prefix_z, Tensor? delta, bool need_inputs, bool need_weights)"
    " -> (" + ", ".join(["Tensor"] * DIFFERENTIABLE) + ")",
)
def hybrid_attention_backward_op(*arguments):
    """`Gradients`, with empty tensors in place of None."""
    dy, dS, dz, y, den, top, arg, prefix_S, prefix_z, delta, need_inputs, need_weights = arguments[-12:]
    grads = backward(
        _operands(*arguments[:-12]),
        prefix_S,
        prefix_z,
        Outputs(y, den, top, arg, delta),
        dy if dy.stride(-1) == 1 else dy.contiguous(),
        None if dS is None else dS.contiguous(),
        None if dz is None else dz.contiguous(),
        need_inputs=need_inputs,
        need_weights=need_weights,
    )
    return tuple(y.new_empty(0) if grad is None else grad for grad in grads)


@hybrid_attention_backward_op.register_fake
def _(*arguments):
    need_inputs, need_weights = arguments[-2:]
    q, k, v, gamma, q_weight, k_weight, q_bias, k_bias, S, z, sink_k, sink_v = arguments[:DIFFERENTIABLE]
    empty = partial(torch.empty_like, memory_format=torch.contiguous_format)
    grads = [torch.empty_like(x) if need_inputs else None for x in (q, k, v)]
    grads.append(empty(gamma))
    grads += [empty(x) if need_weights and x is not None else None for x in (q_weight, k_weight, q_bias, k_bias)]
    grads += [None if x is None else empty(x) for x in (S, z)]
    grads += [empty(x) if need_inputs and x is not None else None for x in (sink_k, sink_v)]
    return tuple(q.new_empty(0) if grad is None else grad for grad in grads)


def _save(ctx, inputs, output):
    y, _, _, *kept = output
    ctx.save_for_backward(*inputs[:TENSORS], y, *kept)
    ctx.settings = inputs[TENSORS:-1]
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dS, dz, *_):
    tensors, (y, *kept) = ctx.saved_tensors[:TENSORS], ctx.saved_tensors[TENSORS:]
    needs = ctx.needs_input_grad
    if dy is None:
        dy = torch.zeros_like(y)
    need_inputs, need_weights = any(needs[i] for i in _INPUTS), any(needs[i] for i in _WEIGHTS)
    grads = hybrid_attention_backward_op(*tensors, *ctx.settings, dy, dS, dz, y, *kept, None, need_inputs, need_weights)
    grads = [grad if need and grad.numel() > 0 else None for grad, need in zip(grads, needs, strict=False)]
    return (*grads, *[None] * (len(needs) - DIFFERENTIABLE))


hybrid_attention_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op(
    "lolcats::hybrid_attention_error",
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor target) -> (" + ", ".join(["Tensor"] * 8) + ")",
)
def hybrid_attention_error_op(*arguments):
    """The sum of squares of y - target; error, den, top, arg of `Outputs`, the prefixes of `States`, and delta."""
    x, target = _operands(*arguments[:-1]).with_small_weights(), arguments[-1]
    states = None if x.spec.feature_map is None else chunk_states(x)
    out = attend(x, states, save=True, target=target)
    assert out.delta is not None
    assert out.square is not None
    return out.square.sum(), out.y, out.den, out.top, out.arg, *_prefixes(x, states), out.delta


@hybrid_attention_error_op.register_fake
def _(*arguments):
    x = _operands(*arguments[:-1])
    rows = (x.batch, x.heads, x.tokens)
    den, top, delta = (x.q.new_empty(rows, dtype=torch.float32) for _ in range(3))
    arg = x.q.new_empty(rows, dtype=torch.int32)
    square = x.q.new_empty((), dtype=torch.float32)
    return square, torch.empty_like(x.q), den, top, arg, *_fake_prefixes(x, save=True), delta


def _save_error(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:TENSORS], *output[1:])
    ctx.settings = inputs[TENSORS:-1]
    ctx.set_materialize_grads(False)


def _backward_error(ctx, d_sum, *_):
    tensors, (error, *kept) = ctx.saved_tensors[:TENSORS], ctx.saved_tensors[TENSORS:]
    needs = ctx.needs_input_grad
    need_weights = any(needs[i] for i in _WEIGHTS)
    grads = hybrid_attention_backward_op(*tensors, *ctx.settings, error, None, None, error, *kept, False, need_weights)
    factor = 2.0 * d_sum  # everything is linear in the gradient of y, which is 2 (y - target) d_sum
    grads = [grad * factor if need and grad.numel() > 0 else None for grad, need in zip(grads, needs, strict=False)]
    return (*grads, *[None] * (len(needs) - DIFFERENTIABLE))


hybrid_attention_error_op.register_autograd(_backward_error, setup_context=_save_error)
