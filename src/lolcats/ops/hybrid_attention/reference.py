"""Hybrid attention with all weights materialised: quadratic, differentiable, the reference of all implementations."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.equation import (
    key_features,
    query_features,
    quotient,
    repeat_heads,
    scores,
    softmax_weights,
)
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.state import HybridState, accumulation_dtype, push_tokens, ring_positions


def reference_weights(
    q_BHTD: Tensor,
    k_BHJD: Tensor,
    phi_q_BHTF: Tensor | None,
    phi_k_BHJF: Tensor | None,
    config: AttentionConfig,
    params: HybridParams,
    query_position_BT: Tensor,
    key_position_BJ: Tensor,
    key_valid_BJ: Tensor,
) -> tuple[Tensor, Tensor]:
    """Weights [B, H, T, J] before normalising, and their sum [B, H, T, 1] with that of the sink logits.

    Keys carry the query heads already. Features are None without a linear part.
    """
    query, key = query_position_BT[:, None, :, None], key_position_BJ[:, None, None, :]
    visible = key_valid_BJ[:, None, None, :] & (key <= query)
    in_softmax = visible & ((key >= config.window_start(query)) | (key < config.sinks))
    weight, total = q_BHTD.new_zeros(()), q_BHTD.new_zeros(())
    if config.has_softmax:
        sink_logits = params.sink_logits
        sink = None if sink_logits is None else sink_logits.to(q_BHTD.dtype)[:, None, None]
        share, mass, total = softmax_weights(scores(q_BHTD, k_BHJD, params.scale, params.softcap), in_softmax, sink)
        gamma = config.gamma_at(params.gamma.to(q_BHTD.dtype)[:, None, None], query)
        weight, total = gamma * mass * share, gamma * total
    if phi_q_BHTF is not None and phi_k_BHJF is not None:
        linear = (phi_q_BHTF @ phi_k_BHJF.mT).masked_fill(in_softmax | ~visible, 0.0)
        weight, total = weight + linear, total + linear.sum(-1, keepdim=True)
    return weight, total


def reference(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    state: HybridState,
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`."""
    dtype = accumulation_dtype(q_BHTD.dtype)
    heads, tokens = q_BHTD.shape[1:3]
    query_position_BT = state.position[:, None] + torch.arange(tokens, device=q_BHTD.device)

    # Every key there is, with its position: sinks, ring, new tokens.
    sink_J = torch.arange(config.sinks, device=q_BHTD.device).expand(len(state.position), -1)
    ring_J = ring_positions(state.position, config.capacity)
    folded_before = config.window_start(state.position - 1)[:, None]
    position_BJ = torch.cat([sink_J, ring_J, query_position_BT], dim=1)
    valid_BJ = torch.cat(
        [
            sink_J < state.position[:, None],
            (ring_J >= folded_before) & (ring_J >= config.sinks),
            torch.ones_like(query_position_BT, dtype=torch.bool),
        ],
        dim=1,
    )
    q = q_BHTD.to(dtype)
    k_BGJD = torch.cat([state.sink_k, state.k, k_BGTD], dim=2).to(dtype)
    v_BGJD = torch.cat([state.sink_v, state.v, v_BGTD], dim=2).to(dtype)
    after = push_tokens(state, config, k_BGTD, v_BGTD)
    phi_q_BHTF = phi_k_BHJF = None
    if config.feature_map is not None:
        phi_q_BHTF, phi_k_BSJF = query_features(q, config, params), key_features(k_BGJD, config, params)
        phi_k_BHJF = repeat_heads(phi_k_BSJF, heads)
        folded_after = config.window_start(after.position - 1)[:, None]
        leaves = valid_BJ & (position_BJ >= config.sinks) & (position_BJ < folded_after)
        left_BSJF = phi_k_BSJF * leaves[:, None, :, None]
        v_BSJD = repeat_heads(v_BGJD, phi_k_BSJF.shape[1])
        after = replace(after, S=state.S + left_BSJF.mT @ v_BSJD, z=state.z + left_BSJF.sum(-2))

    weight, denominator = reference_weights(
        q,
        repeat_heads(k_BGJD, heads),
        phi_q_BHTF,
        phi_k_BHJF,
        config,
        params,
        query_position_BT,
        position_BJ,
        valid_BJ,
    )
    numerator = weight @ repeat_heads(v_BGJD, heads)
    if phi_q_BHTF is not None:
        numerator = numerator + phi_q_BHTF @ repeat_heads(state.S, heads)
        denominator = denominator + phi_q_BHTF @ repeat_heads(state.z, heads)[..., None]
    return quotient(numerator, denominator).to(q_BHTD.dtype), after
