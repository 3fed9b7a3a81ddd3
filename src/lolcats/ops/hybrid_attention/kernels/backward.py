"""The backward pass of the hybrid attention: which kernels run, in which order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.key_gradient import key_gradients
from lolcats.ops.hybrid_attention.kernels.operands import Operands
from lolcats.ops.hybrid_attention.kernels.outputs import Outputs
from lolcats.ops.hybrid_attention.kernels.query_gradient import query_gradients
from lolcats.ops.hybrid_attention.kernels.sink_gradient import sink_gradients
from lolcats.ops.hybrid_attention.kernels.state_gradient import state_gradients
from lolcats.ops.hybrid_attention.kernels.weight_gradient import weight_gradients
from lolcats.ops.hybrid_attention.kernels.window_gradient import window_gradients


class Gradients(NamedTuple):
    """Of the first twelve fields of `Operands`, in their order, shapes and types; None where not needed."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    gamma: Tensor | None = None
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    S: Tensor | None = None
    z: Tensor | None = None
    sink_k: Tensor | None = None
    sink_v: Tensor | None = None


def backward(
    operands: Operands,
    prefix_S: Tensor,
    prefix_z: Tensor,
    out: Outputs,
    dy: Tensor,
    dS: Tensor | None,
    dz: Tensor | None,
    *,
    need_inputs: bool,
    need_weights: bool,
) -> Gradients:
    """Gradients from those of y and of the final state.

    prefix_S, prefix_z: of the forward pass's `States`; not read without a linear part.
    need_inputs: those of q, k, v and the sinks, which training only the feature maps does not need.
    need_weights: those of the feature maps.
    """
    x = operands.with_small_weights()
    assert x.spec.linear_length_cap == 0  # see `support.supports`
    is_linear = x.spec.feature_map is not None
    window = window_gradients(x, out, dy, need_inputs=need_inputs)
    queries = query_gradients(x, prefix_S, prefix_z, out, window, dy, need_inputs=need_inputs)
    gamma = torch.zeros_like(x.gamma)  # without a linear part nothing depends on it
    if queries.tile_dgamma is not None:
        gamma = queries.tile_dgamma.sum((0, 2)).to(x.gamma.dtype)
    grads = Gradients(q=queries.dq, gamma=gamma)
    passed = state_gradients(x, queries, dy, dS, dz) if is_linear else None
    if passed is not None and x.S is not None:
        grads = grads._replace(S=passed.initial_S, z=passed.initial_z)
    if need_inputs or need_weights:
        keys = key_gradients(x, window, queries, passed, dy, need_inputs=need_inputs)
        grads = grads._replace(k=keys.dk, v=keys.dv)
        if need_weights and queries.dx is not None and keys.dx is not None:
            assert operands.q_weight is not None
            assert operands.k_weight is not None
            q_weight, q_bias = weight_gradients(x, x.q, queries.dx)
            k_weight, k_bias = weight_gradients(x, x.k, keys.dx)
            grads = grads._replace(
                q_weight=q_weight.to(operands.q_weight.dtype), k_weight=k_weight.to(operands.k_weight.dtype)
            )
            if x.q_bias is not None and x.k_bias is not None:
                grads = grads._replace(q_bias=q_bias.to(x.q_bias.dtype), k_bias=k_bias.to(x.k_bias.dtype))
    if need_inputs and x.sink_k is not None:
        sink_k, sink_v = sink_gradients(x, window, dy)
        grads = grads._replace(sink_k=sink_k, sink_v=sink_v)
    return grads
