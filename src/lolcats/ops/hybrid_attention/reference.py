"""Hybrid attention as its equation (see `lolcats.config.attention`), with every weight written out.

Quadratic, differentiable, and of whole sequences alone. It shares nothing with the implementations that it checks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.eight_bits import dense
from lolcats.ops.hybrid_attention.state import DENOMINATOR_FLOOR, HybridParams, HybridState


def reference(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, config: AttentionConfig, params: HybridParams, *, state: HybridState
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`; `state` is the initial one."""
    dtype = torch.promote_types(q_BHTD.dtype, torch.float32)
    (B, H, T, D), G = q_BHTD.shape, k_BGTD.shape[1]
    if T == 0:
        return q_BHTD, state
    dense_kv = (dense(x, q_BHTD.dtype).to(dtype) for x in (k_BGTD, v_BGTD))
    q, k, v = q_BHTD.to(dtype), *(x.repeat_interleave(H // G, 1) for x in dense_kv)

    # Which keys j each query n sees, and which of these are in its softmax part.
    j = torch.arange(T, device=q.device)
    n = j[:, None]
    if config.window == "sliding" or config.window_size == 0:
        in_window = n - j < config.window_size
    else:
        in_window = n // config.window_size - j // config.window_size < config.window_blocks
    softmax_TT = (j <= n) & (in_window | (j < config.sinks))
    linear_TT = (j <= n) & ~softmax_TT

    weight, denominator = q.new_zeros(B, H, T, T), q.new_zeros(B, H, T, 1)
    if config.window_size > 0 or config.sinks > 0:
        score = q @ k.mT * (D**-0.5 if params.scale is None else params.scale)
        if params.softcap is not None:
            score = params.softcap * torch.tanh(score / params.softcap)
        score = score.masked_fill(~softmax_TT, -torch.inf)
        if params.sink_logits is not None:  # one more score, of a key without a value
            score = torch.cat([score, params.sink_logits.to(dtype).view(H, 1, 1).expand(B, H, T, 1)], -1)
        gamma = params.gamma.to(dtype).view(H, 1, 1)
        if config.linear_length_cap > 0:
            gamma = gamma * ((n + 1).to(dtype) / config.linear_length_cap).clamp_min(1.0)
        exponential = gamma * (score - score.amax(-1, keepdim=True)).exp()
        weight, denominator = exponential[..., :T], exponential.sum(-1, keepdim=True)

    def put(tokens_J: Tensor, new_BGTD: Tensor, old_BGCD: Tensor) -> Tensor:
        """Keys or values of some tokens in the slots of their positions."""
        return old_BGCD.index_copy(2, tokens_J % max(old_BGCD.shape[2], 1), new_BGTD[:, :, tokens_J])

    latest, first = j[max(T - config.capacity, 0) :], j[: config.sinks]
    after = state._replace(
        k=put(latest, k_BGTD, state.k),
        v=put(latest, v_BGTD, state.v),
        sink_k=put(first, k_BGTD, state.sink_k),
        sink_v=put(first, v_BGTD, state.sink_v),
        position=state.position + T,
    )
    if config.feature_map is not None:
        assert params.q_weight is not None
        assert params.k_weight is not None
        repeats = H // len(params.k_weight)  # query heads of a state
        phi_q_BHTF = _features(q, config.feature_map, params.q_weight, params.q_bias)
        phi_k_BSTF = _features(k[:, ::repeats], config.feature_map, params.k_weight, params.k_bias)
        linear = (phi_q_BHTF @ phi_k_BSTF.repeat_interleave(repeats, 1).mT).masked_fill(~linear_TT, 0.0)
        weight, denominator = weight + linear, denominator + linear.sum(-1, keepdim=True)
        left_BSTF = phi_k_BSTF * linear_TT[-1][:, None]  # of the keys that are linear for the last query
        after = after._replace(S=left_BSTF.mT @ v[:, ::repeats], z=left_BSTF.sum(-2))
    return (weight @ v / denominator.clamp_min(DENOMINATOR_FLOOR)).to(q_BHTD.dtype), after


def _features(x_BHTD: Tensor, name: str, weight_HDP: Tensor, bias_HP: Tensor | None) -> Tensor:
    """phi(x), [B, H, T, F]."""
    y = x_BHTD @ weight_HDP.to(x_BHTD.dtype)
    if bias_HP is not None:
        y = y + bias_HP.to(y.dtype)[:, None]
    if name == "hedgehog":
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)
    assert name == "t2r"
    return y.relu()
