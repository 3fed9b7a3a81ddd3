"""Hybrid attention with all weights written out: quadratic, plain, the truth that others are tested against."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.ops.hybrid_attention.params import DENOMINATOR_FLOOR, HybridParams
from lolcats.ops.hybrid_attention.state import HybridState, accumulation_dtype, push_tokens, ring_positions


def reference_weights(
    q_BHTD: Tensor,
    k_BHJD: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    query_position_BT: Tensor,
    key_position_BJ: Tensor,
    key_valid_BJ: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised weights, before the initial state's share.

    Returns the softmax part and the linear part [B, H, T, J] and the extra denominator [B, H, T, 1] of
    `params.sink_logits`. Keys carry the query heads already.
    """
    query = query_position_BT[:, None, :, None]
    key = key_position_BJ[:, None, None, :]
    visible = key_valid_BJ[:, None, None, :] & (key <= query)
    in_softmax = visible & ((key >= spec.window_start(query)) | (key < spec.sinks))

    score = q_BHTD @ k_BHJD.transpose(-1, -2) * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(~in_softmax, -torch.inf)
    gamma = spec.gamma_at(params.gamma.to(score.dtype)[:, None, None], query)
    extra = torch.zeros_like(score[..., :1])
    if spec.has_softmax:
        top = score.amax(-1, keepdim=True)
        if params.sink_logits is not None:
            sink = params.sink_logits.to(score.dtype)[:, None, None].expand_as(top)
            top = torch.maximum(top, sink)
            extra = gamma * (sink - top).exp()
        top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))  # rows without any key (padding)
        softmax_part = gamma * (score - top).exp()
    else:
        softmax_part = torch.zeros_like(score)

    if spec.feature_map is None:
        return softmax_part, torch.zeros_like(score), extra
    assert params.q_weight is not None
    assert params.k_weight is not None
    phi = get_feature_map(spec.feature_map)
    phi_q_BHTF = phi(q_BHTD, params.q_weight.to(q_BHTD.dtype), _cast(params.q_bias, q_BHTD))
    repeats = q_BHTD.shape[1] // params.k_weight.shape[0]
    k_weight = params.k_weight.to(k_BHJD.dtype).repeat_interleave(repeats, 0)
    k_bias = None if params.k_bias is None else params.k_bias.to(k_BHJD.dtype).repeat_interleave(repeats, 0)
    phi_k_BHJF = phi(k_BHJD, k_weight, k_bias)
    linear_part = (phi_q_BHTF @ phi_k_BHJF.transpose(-1, -2)).masked_fill(in_softmax | ~visible, 0.0)
    return softmax_part, linear_part, extra


def reference(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    *,
    scale: float,
    softcap: float | None,
    state: HybridState,
    fresh: bool = True,
    length_B: Tensor | None = None,
    need_state: bool = True,
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`; token t of sequence b is real iff t < length_B[b] (None: all are).

    `fresh` (the state is the initial one) and `need_state` only let faster implementations skip work.
    """
    if length_B is None:
        length_B = torch.full_like(state.position, q_BHTD.shape[2])
    dtype = accumulation_dtype(q_BHTD.dtype)
    tokens, repeats = q_BHTD.shape[2], q_BHTD.shape[1] // k_BGTD.shape[1]
    step_T = torch.arange(tokens, device=q_BHTD.device)
    query_position_BT = state.position[:, None] + step_T

    # Every key there is, with its position: sinks, ring, new tokens.
    sink_J = torch.arange(spec.sinks, device=q_BHTD.device).expand(len(state.position), -1)
    ring_J = ring_positions(state.position, spec.capacity)
    folded_before = spec.window_start(state.position - 1)[:, None]
    position_BJ = torch.cat([sink_J, ring_J, query_position_BT], dim=1)
    valid_BJ = torch.cat(
        [
            sink_J < state.position[:, None],
            (ring_J >= folded_before) & (ring_J >= spec.sinks),
            step_T < length_B[:, None],
        ],
        dim=1,
    )
    k_BGJD = torch.cat([state.sink_k, state.k, k_BGTD], dim=2).to(dtype)
    v_BGJD = torch.cat([state.sink_v, state.v, v_BGTD], dim=2).to(dtype)
    k_BHJD, v_BHJD = k_BGJD.repeat_interleave(repeats, 1), v_BGJD.repeat_interleave(repeats, 1)

    q = q_BHTD.to(dtype)
    softmax_part, linear_part, extra = reference_weights(
        q, k_BHJD, spec, params, query_position_BT, position_BJ, valid_BJ, scale, softcap
    )
    weight = softmax_part + linear_part
    numerator = weight @ v_BHJD
    denominator = weight.sum(-1, keepdim=True) + extra

    after = push_tokens(state, spec, k_BGTD, v_BGTD, length_B)
    if spec.feature_map is not None:
        assert params.q_weight is not None
        assert params.k_weight is not None
        phi = get_feature_map(spec.feature_map)
        phi_q_BHTF = phi(q, params.q_weight.to(dtype), _cast(params.q_bias, q))
        spread = q_BHTD.shape[1] // state.S.shape[1]
        numerator = numerator + phi_q_BHTF @ state.S.repeat_interleave(spread, 1)
        denominator = denominator + phi_q_BHTF @ state.z.repeat_interleave(spread, 1)[..., None]

        state_repeats = state.S.shape[1] // k_BGTD.shape[1]
        phi_k_BSJF = phi(k_BGJD.repeat_interleave(state_repeats, 1), params.k_weight.to(dtype), _cast(params.k_bias, q))
        folded_after = spec.window_start(after.position - 1)[:, None]
        leaves = valid_BJ & (position_BJ >= spec.sinks) & (position_BJ < folded_after)
        phi_k_BSJF = phi_k_BSJF * leaves[:, None, :, None]
        after = replace(
            after,
            S=state.S + phi_k_BSJF.transpose(-1, -2) @ v_BGJD.repeat_interleave(state_repeats, 1),
            z=state.z + phi_k_BSJF.sum(-2),
        )

    y_BHTD = numerator / denominator.clamp_min(DENOMINATOR_FLOOR)
    real_T1 = (step_T < length_B[:, None])[:, None, :, None]
    return y_BHTD.masked_fill(~real_T1, 0.0).to(q_BHTD.dtype), after


def _cast(tensor: Tensor | None, like: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(like.dtype)
