"""One token with a state: constant time, the work of decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.eight_bits import dense
from lolcats.ops.hybrid_attention.equation import (
    key_features,
    query_features,
    quotient,
    repeat_heads,
    scores,
    softmax_weights,
)
from lolcats.ops.hybrid_attention.state import HybridParams, HybridState, accumulation_dtype, ring_positions


def step(
    q_BH1D: Tensor, k_BG1D: Tensor, v_BG1D: Tensor, config: AttentionConfig, params: HybridParams, *, state: HybridState
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`, T = 1; the state's own tensors are written."""
    dtype = accumulation_dtype(q_BH1D.dtype)
    position_B = state.position.clone()
    real_B = position_B >= 0

    _fold_leaving(config, params, state, k_BG1D, v_BG1D, real_B, q_BH1D.dtype)
    for buffer, new in ((state.k, k_BG1D), (state.v, v_BG1D)):
        _write(buffer, position_B % max(config.capacity, 1), new, real_B)
    for buffer, new in ((state.sink_k, k_BG1D), (state.sink_v, v_BG1D)):
        _write(buffer, position_B.clamp_max(config.sinks - 1), new, real_B & (position_B < config.sinks))
    state.position.add_(real_B)

    q, groups = q_BH1D.to(dtype), state.k.shape[1]
    numerator = denominator = q.new_zeros(())
    if config.has_softmax:
        key_BGJD = dense(_join_tokens(state.sink_k, state.k), q_BH1D.dtype).to(dtype)
        value_BGJD = dense(_join_tokens(state.sink_v, state.v), q_BH1D.dtype).to(dtype)
        sink_GR1 = None if params.sink_logits is None else params.sink_logits.to(dtype).view(groups, -1, 1)
        gamma = config.gamma_at(params.gamma.to(dtype).view(groups, -1, 1), position_B[:, None, None, None])
        score_BGRJ = scores(q.reshape(len(q), groups, -1, q.shape[3]), key_BGJD, params)
        # What the query sees of the state, its own token written.
        position_B1, ring_BC = position_B[:, None], ring_positions(position_B + 1, config.capacity)
        seen_BS = torch.arange(config.sinks, device=q.device) <= position_B1
        seen_BC = (ring_BC >= config.window_start(position_B1)) & (ring_BC >= config.sinks)
        seen_BJ = torch.cat([seen_BS, seen_BC], 1)
        share_BGRJ, mass_BGR1, total_BGR1 = softmax_weights(score_BGRJ, seen_BJ[:, None, None], sink_GR1)
        numerator = (gamma * mass_BGR1 * (share_BGRJ @ value_BGJD)).flatten(1, 2)
        denominator = (gamma * total_BGR1).flatten(1, 2)
    if config.feature_map is not None:
        phi_BSRF = query_features(q, config, params)[:, :, 0].unflatten(1, (state.S.shape[1], -1))
        numerator = numerator + (phi_BSRF @ state.S).flatten(1, 2)
        denominator = denominator + (phi_BSRF @ state.z[..., None]).flatten(1, 2)
    y_BHD = quotient(numerator, denominator).masked_fill(~real_B[:, None, None], 0.0)
    return y_BHD[:, :, None].to(q_BH1D.dtype), state


def _fold_leaving(
    config: AttentionConfig,
    params: HybridParams,
    state: HybridState,
    k_BG1D: Tensor,
    v_BG1D: Tensor,
    real_B: Tensor,
    dtype: torch.dtype,
) -> None:
    """Add to S and z the tokens that leave the window when the token at `state.position` comes in."""
    if config.feature_map is None:
        return
    if config.window_size == 0:  # no window: the token itself
        keys, values = k_BG1D, v_BG1D
        leaves_BL = (real_B & (state.position >= config.sinks))[:, None]
    elif config.window == "sliding":  # one token, from the slot about to be written
        keys, values = _slots(state, state.position[:, None] % config.capacity)
        leaves_BL = (real_B & (state.position - config.capacity >= config.sinks))[:, None]
    else:  # a whole block, once per block
        starts_B = real_B & (state.position % config.window_size == 0) & (state.position >= config.capacity)
        if not bool(starts_B.any()):
            return
        position_BL = state.position[:, None] - config.capacity
        position_BL = position_BL + torch.arange(config.window_size, device=starts_B.device)
        keys, values = _slots(state, position_BL % config.capacity)
        leaves_BL = starts_B[:, None] & (position_BL >= config.sinks)
    keys, values = (dense(x, dtype).to(state.S.dtype) for x in (keys, values))
    phi_BSLF = key_features(keys, config, params) * leaves_BL[:, None, :, None]
    state.S.add_(phi_BSLF.mT @ repeat_heads(values, phi_BSLF.shape[1]))
    state.z.add_(phi_BSLF.sum(-2))


def _slots(state: HybridState, slot_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values in the given ring slots: [B, G, L, D] each."""
    index = slot_BL[:, None, :, None].expand(-1, state.k.shape[1], -1, state.k.shape[3])
    return state.k.gather(2, index), state.v.gather(2, index)


def _join_tokens(*parts_BGxD: Tensor) -> Tensor:
    """[B, G, J, D]: along the tokens; not a copy where only one part has any, as in most layers."""
    filled = [x_BGxD for x_BGxD in parts_BGxD if x_BGxD.shape[2] > 0]
    return filled[0] if len(filled) == 1 else torch.cat(parts_BGxD, dim=2)


def _write(buffer_BGCD: Tensor, slot_B: Tensor, new_BG1D: Tensor, where_B: Tensor) -> None:
    """Put one token per sequence into its slot, where `where_B`."""
    if buffer_BGCD.shape[2] == 0:
        return
    new_BGD = new_BG1D[:, :, 0].to(buffer_BGCD.dtype)
    row_B = torch.arange(len(slot_B), device=slot_B.device)
    old_BGD = buffer_BGCD[row_B, :, slot_B]
    buffer_BGCD[row_B, :, slot_B] = torch.where(where_B[:, None, None], new_BGD, old_BGD)
