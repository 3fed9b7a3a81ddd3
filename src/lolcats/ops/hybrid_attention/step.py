"""One token with a state and without autograd: constant time, the work of decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.ops.hybrid_attention.params import DENOMINATOR_FLOOR, HybridParams
from lolcats.ops.hybrid_attention.state import HybridState, accumulation_dtype, ring_positions
from lolcats.ops.hybrid_attention.step_uniform import common_position, step_uniform


def step(
    q_BH1D: Tensor,
    k_BG1D: Tensor,
    v_BG1D: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    *,
    scale: float,
    softcap: float | None,
    state: HybridState,
    mask: Tensor | None,
    inplace: bool,
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`, T = 1. A sequence whose `mask` [B, 1] is False keeps its state."""
    if not inplace:
        state = state.clone()
    position = common_position(state, mask)
    if position is not None:
        y_BH1D = step_uniform(
            q_BH1D, k_BG1D, v_BG1D, spec, params, scale=scale, softcap=softcap, state=state, position=position
        )
        return y_BH1D.to(q_BH1D.dtype), state
    dtype = accumulation_dtype(q_BH1D.dtype)
    real_B = torch.ones_like(state.position, dtype=torch.bool) if mask is None else mask[:, 0].bool()
    position_B = state.position.clone()

    _fold(spec, params, state, k_BG1D, v_BG1D, real_B, dtype)
    _write(state.k, position_B % max(spec.capacity, 1), k_BG1D, real_B)
    _write(state.v, position_B % max(spec.capacity, 1), v_BG1D, real_B)
    if spec.sinks > 0:
        is_sink_B = real_B & (position_B < spec.sinks)
        _write(state.sink_k, position_B.clamp_max(spec.sinks - 1), k_BG1D, is_sink_B)
        _write(state.sink_v, position_B.clamp_max(spec.sinks - 1), v_BG1D, is_sink_B)
    state.position += real_B

    batch, heads, _, dim = q_BH1D.shape
    kv_heads = k_BG1D.shape[1]
    q_BGRD = q_BH1D.to(dtype).view(batch, kv_heads, heads // kv_heads, dim)
    numerator = q_BGRD.new_zeros(())
    denominator = q_BGRD.new_zeros(())
    if spec.has_softmax:
        key_BGWD = torch.cat([state.sink_k, state.k], dim=2) if spec.sinks else state.k
        value_BGWD = torch.cat([state.sink_v, state.v], dim=2) if spec.sinks else state.v
        score_BGRW = q_BGRD @ key_BGWD.to(dtype).transpose(-1, -2) * scale
        if softcap is not None:
            score_BGRW = softcap * torch.tanh(score_BGRW / softcap)
        seen_BW = _seen(spec, position_B)
        score_BGRW = score_BGRW.masked_fill(~seen_BW[:, None, None], -torch.inf)
        top_BGR1 = score_BGRW.amax(-1, keepdim=True)
        gamma_GR1 = params.gamma.to(dtype).view(kv_heads, -1, 1)
        gamma_BGR1 = spec.gamma_at(gamma_GR1, position_B[:, None, None, None])
        if params.sink_logits is not None:
            logit_GR1 = params.sink_logits.to(dtype).view(kv_heads, -1, 1)
            top_BGR1 = torch.maximum(top_BGR1, logit_GR1)
            denominator = gamma_BGR1 * (logit_GR1 - top_BGR1).exp()
        weight_BGRW = gamma_BGR1 * (score_BGRW - top_BGR1).exp()
        numerator = weight_BGRW @ value_BGWD.to(dtype)
        denominator = denominator + weight_BGRW.sum(-1, keepdim=True)
    if spec.feature_map is not None:
        phi = get_feature_map(spec.feature_map)
        assert params.q_weight is not None
        bias = None if params.q_bias is None else params.q_bias.to(dtype)
        phi_q_BH1F = phi(q_BH1D.to(dtype), params.q_weight.to(dtype), bias)
        phi_q_BSMF = phi_q_BH1F.view(batch, state.S.shape[1], -1, phi_q_BH1F.shape[-1])
        numerator = numerator + (phi_q_BSMF @ state.S).view(batch, kv_heads, -1, dim)
        denominator = denominator + (phi_q_BSMF @ state.z[..., None]).view(batch, kv_heads, -1, 1)
    y_BGRD = numerator / denominator.clamp_min(DENOMINATOR_FLOOR)
    y_BH1D = y_BGRD.reshape(batch, heads, 1, dim)
    if mask is not None:
        y_BH1D = y_BH1D.masked_fill(~real_B[:, None, None, None], 0.0)
    return y_BH1D.to(q_BH1D.dtype), state


def as_step(attend: Callable[..., tuple[Tensor, HybridState]]) -> Callable[..., tuple[Tensor, HybridState]]:
    """An implementation for any number of tokens, called as `step` is."""

    def one_token(
        q_BH1D: Tensor,
        k_BG1D: Tensor,
        v_BG1D: Tensor,
        *args: Any,
        state: HybridState,
        mask: Tensor | None,
        inplace: bool,
        **options: Any,
    ) -> tuple[Tensor, HybridState]:
        length_B = None if mask is None else mask[:, 0].long()
        y_BH1D, after = attend(
            q_BH1D, k_BG1D, v_BG1D, *args, state=state, length_B=length_B, fresh=False, need_state=True, **options
        )
        if not inplace:
            return y_BH1D, after
        state.copy_(after)
        return y_BH1D, state

    return one_token


def _fold(
    spec: AttentionConfig,
    params: HybridParams,
    state: HybridState,
    k_BG1D: Tensor,
    v_BG1D: Tensor,
    real_B: Tensor,
    dtype: torch.dtype,
) -> None:
    """Add to S and z the tokens that leave the window when the token at `state.position` comes in."""
    if spec.feature_map is None:
        return
    if spec.window_size == 0:  # no window: the token itself
        keys, values = k_BG1D, v_BG1D
        leaves_BL = (real_B & (state.position >= spec.sinks))[:, None]
    elif spec.window == "sliding":  # one token, from the slot about to be written
        keys, values = _slots(state, state.position[:, None] % spec.capacity)
        leaves_BL = (real_B & (state.position - spec.capacity >= spec.sinks))[:, None]
    else:  # a whole block, once per block
        starts_B = real_B & spec.block_leaves(state.position)
        if not bool(starts_B.any()):
            return
        offset_L = torch.arange(spec.window_size, device=starts_B.device)
        first_B1 = state.position[:, None] - spec.capacity
        keys, values = _slots(state, (first_B1 + offset_L) % spec.capacity)
        leaves_BL = starts_B[:, None] & (first_B1 + offset_L >= spec.sinks)

    phi = get_feature_map(spec.feature_map)
    assert params.k_weight is not None
    repeats = state.S.shape[1] // keys.shape[1]
    bias = None if params.k_bias is None else params.k_bias.to(dtype)
    keys_BSLD, values_BSLD = keys.to(dtype), values.to(dtype)
    if repeats > 1:
        keys_BSLD, values_BSLD = keys_BSLD.repeat_interleave(repeats, 1), values_BSLD.repeat_interleave(repeats, 1)
    phi_BSLF = phi(keys_BSLD, params.k_weight.to(dtype), bias) * leaves_BL[:, None, :, None]
    state.S += phi_BSLF.transpose(-1, -2) @ values_BSLD
    state.z += phi_BSLF.sum(-2)


def _slots(state: HybridState, slot_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values in the given ring slots: [B, G, L, D] each."""
    index = slot_BL[:, None, :, None].expand(-1, state.k.shape[1], -1, state.k.shape[3])
    return state.k.gather(2, index), state.v.gather(2, index)


def _write(buffer_BGCD: Tensor, slot_B: Tensor, new_BG1D: Tensor, where_B: Tensor) -> None:
    """Put one token per sequence into its slot, where `where_B`."""
    if buffer_BGCD.shape[2] == 0:
        return
    row_B = torch.arange(len(slot_B), device=slot_B.device)
    new_BGD = new_BG1D[:, :, 0].to(buffer_BGCD.dtype)
    old_BGD = buffer_BGCD[row_B, :, slot_B]
    buffer_BGCD[row_B, :, slot_B] = torch.where(where_B[:, None, None], new_BGD, old_BGD)


def _seen(spec: AttentionConfig, position_B: Tensor) -> Tensor:
    """[B, sinks + C] bool: which sinks and slots the query at `position_B` sees, its own token written."""
    sink_W = torch.arange(spec.sinks, device=position_B.device)
    slot_BC = ring_positions(position_B + 1, spec.capacity)
    first_B1 = spec.window_start(position_B)[:, None]
    return torch.cat([sink_W <= position_B[:, None], (slot_BC >= first_B1) & (slot_BC >= spec.sinks)], dim=1)
