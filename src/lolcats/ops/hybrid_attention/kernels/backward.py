"""Backward pass: gradients of the outputs and of the final state, in six launches and a scan.

    window   weights and score gradients of every tile of queries, made once and stored for all later products
    queries  gradients of the queries and of their projections, and their features over the denominator
    states   what each stored state receives; a scan from the end, the mirror image of the forward one
    keys     gradients of keys (with their projections), then of values: a launch each, so that one sum per program
             stays in registers
    weights  of the feature maps: sums over all tokens of x^T dx
    sinks    sums over all queries

With delta = -(dy . y) and w = gamma p / den, the weight of a key in the window (p = exp(score - c_n)), its score
receives ds = w (dy . v + delta), less the row's sum of all ds at the maximal key, because c_n is part of the
function. A sink logit is one more score, of a key whose value is zero. With a softcap every ds is then times the
slope 1 - tanh^2 of its score. All other products with the window are w^T dy, ds^T q and ds k, straight from memory.

The features of a query receive (dy S^T + delta z) / den, and the same through the keys that no stored state holds.
The state before chunk m serves the query tiles whose first window starts in chunk m. So the keys of chunk j receive
the sum of (phi_q / den)^T [dy, delta] over all tiles that read a state after chunk j, and the gradient of the final
state; besides, they receive gradients from the queries that see them in their windows, and from those that see them
linearly but whose tile starts from an earlier state (INNER).

The gradient of gamma, times gamma, is a row's sum of w (dy . v + delta) over the keys of the window. The same sum over
the linear keys, phi . d_phi / den, would be its negative if delta were exact. But y was rounded: an error of delta
enters the first sum p times and the second 1 - p times, p being the sum of w over the window. So 1 - p times the first
less p times the second is the same gradient without that error, which would be its largest. It is also what the sink
logit owes in rows where it is the maximal score: there the error, left in, was up to 8e-3 of the logits' gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.backward_keys import key_gradients, state_gradients
from lolcats.ops.hybrid_attention.kernels.backward_queries import query_gradients
from lolcats.ops.hybrid_attention.kernels.backward_weights import sink_gradients, weight_gradients
from lolcats.ops.hybrid_attention.kernels.backward_window import window_gradients
from lolcats.ops.hybrid_attention.kernels.forward import Outputs
from lolcats.ops.hybrid_attention.kernels.shape import Operands


class Gradients(NamedTuple):
    """Of the first tensors of the operator, in their order, shapes and types; None where not needed."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    gamma: Tensor | None = None
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    sink_logits: Tensor | None = None
    S: Tensor | None = None
    z: Tensor | None = None
    sink_k: Tensor | None = None
    sink_v: Tensor | None = None


def backward(
    x: Operands,
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
    window = window_gradients(x, out, dy, need_inputs=need_inputs)
    queries = query_gradients(x, prefix_S, prefix_z, out, window, dy, need_inputs=need_inputs)
    tile_dsink = window.tile_dsink
    if tile_dsink is not None and queries.tile_at_sink is not None:
        tile_dsink = tile_dsink - x.gamma[:, None] * queries.tile_at_sink
    grads = Gradients(
        q=queries.dq,
        gamma=_of_heads(x.gamma, queries.tile_dgamma),
        sink_logits=_of_heads(x.sink_logits, tile_dsink),
    )
    states = state_gradients(x, queries, dy, dS, dz) if x.is_linear else None
    if states is not None and x.S is not None:
        grads = grads._replace(S=states.initial_S, z=states.initial_z)
    if need_inputs or need_weights:
        keys = key_gradients(x, window, queries, states, dy, need_inputs=need_inputs)
        grads = grads._replace(k=keys.dk, v=keys.dv)
        if need_weights and queries.dx is not None and keys.dx is not None:
            of_q, of_k = weight_gradients(x, x.q, queries.dx), weight_gradients(x, x.k, keys.dx)
            sums = zip(x.maps._fields, x.maps, (of_q[0], of_k[0], of_q[1], of_k[1]), strict=True)
            grads = grads._replace(**{name: d.to(w.dtype) for name, w, d in sums if w is not None})
    if need_inputs and x.sink_k is not None:
        sink_k, sink_v = sink_gradients(x, window, dy)
        grads = grads._replace(sink_k=sink_k, sink_v=sink_v)
    return grads


def _of_heads(x_H: Tensor | None, tiles_BHN: Tensor | None) -> Tensor | None:
    """The gradient of what every head has one of, from all tiles'. Without a linear part nothing depends on gamma."""
    if x_H is None or tiles_BHN is None:
        return None if x_H is None else torch.zeros_like(x_H)
    return tiles_BHN.sum((0, 2)).to(x_H.dtype)
