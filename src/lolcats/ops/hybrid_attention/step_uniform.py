"""`step` where all sequences are at one position: slices and numbers in place of gathers and index tensors.

Decoding on the CPU is bound by the number of small operations; this form has about a third of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.ops.hybrid_attention.params import DENOMINATOR_FLOOR, HybridParams
from lolcats.ops.hybrid_attention.state import HybridState, accumulation_dtype


def common_position(state: HybridState, mask: Tensor | None) -> int | None:
    """The one position of all sequences; None where they differ, or where asking for it would be slow."""
    if mask is not None or state.position.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    positions = state.position.tolist()
    return positions[0] if positions and positions.count(positions[0]) == len(positions) else None


def step_uniform(
    q_BH1D: Tensor,
    k_BG1D: Tensor,
    v_BG1D: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    *,
    scale: float,
    softcap: float | None,
    state: HybridState,
    position: int,
) -> Tensor:
    """y [B, H, 1, D] of one token at `position`; `state` is written."""
    dtype = accumulation_dtype(q_BH1D.dtype)
    _advance(spec, params, state, k_BG1D, v_BG1D, position, dtype)

    batch, heads, _, dim = q_BH1D.shape
    kv_heads = k_BG1D.shape[1]
    pairs, repeats = batch * kv_heads, heads // kv_heads  # pairs: sequences and key/value heads
    q_BH1D = q_BH1D.to(dtype)
    numerator = denominator = None
    if spec.has_softmax:
        key_BGWD = torch.cat([state.sink_k, state.k], dim=2) if spec.sinks else state.k
        value_BGWD = torch.cat([state.sink_v, state.v], dim=2) if spec.sinks else state.v
        key_NWD = key_BGWD.to(dtype).reshape(pairs, -1, dim)
        value_NWD = value_BGWD.to(dtype).reshape(pairs, -1, dim)
        q_NRD = q_BH1D.reshape(pairs, repeats, dim)
        weight_NRW = torch.bmm(q_NRD, key_NWD.transpose(1, 2)).mul_(scale)
        if softcap is not None:
            weight_NRW.div_(softcap).tanh_().mul_(softcap)
        for begin, end in _hidden(spec, position):
            weight_NRW[:, :, begin:end] = -torch.inf
        top_NR1 = weight_NRW.amax(-1, keepdim=True)
        gamma_NR1 = _per_pair(params.gamma, batch, kv_heads, dtype)
        if spec.linear_length_cap:
            gamma_NR1 = gamma_NR1 * max(1.0, (position + 1) / spec.linear_length_cap)
        if params.sink_logits is not None:
            logit_NR1 = _per_pair(params.sink_logits, batch, kv_heads, dtype)
            top_NR1 = torch.maximum(top_NR1, logit_NR1)
        weight_NRW.sub_(top_NR1).exp_().mul_(gamma_NR1)
        numerator = torch.bmm(weight_NRW, value_NWD)
        denominator = weight_NRW.sum(-1, keepdim=True)
        if params.sink_logits is not None:
            denominator += gamma_NR1 * (logit_NR1 - top_NR1).exp()
    if spec.feature_map is not None:
        assert params.q_weight is not None
        phi_q_BHF = _features(spec.feature_map, q_BH1D[:, :, 0], params.q_weight, params.q_bias)
        states = batch * state.S.shape[1]
        phi_q_SMF = phi_q_BHF.reshape(states, -1, phi_q_BHF.shape[-1])
        linear = torch.bmm(phi_q_SMF, state.S.reshape(states, -1, dim)).view(pairs, repeats, dim)
        total = torch.bmm(phi_q_SMF, state.z.reshape(states, -1, 1)).view(pairs, repeats, 1)
        numerator = linear if numerator is None else numerator.add_(linear)
        denominator = total if denominator is None else denominator.add_(total)
    assert numerator is not None
    assert denominator is not None
    return (numerator / denominator.clamp_min_(DENOMINATOR_FLOOR)).view(batch, heads, 1, dim)


def _advance(
    spec: AttentionConfig,
    params: HybridParams,
    state: HybridState,
    k_BG1D: Tensor,
    v_BG1D: Tensor,
    position: int,
    dtype: torch.dtype,
) -> None:
    """S, z, ring, sinks and position after the token at `position`."""
    capacity = spec.capacity
    slot = position % max(capacity, 1)
    if spec.feature_map is not None:
        tokens = spec.window_size if spec.window == "terraced" and spec.window_size > 0 else 1
        # Tokens that leave the window: a block that begins in this slot, the slot's token, or the token itself.
        stay = min(max(spec.sinks - (position - capacity), 0), tokens)
        if position >= capacity and position % tokens == 0 and stay < tokens:
            if capacity == 0:
                k_BGLD, v_BGLD = k_BG1D, v_BG1D
            else:
                k_BGLD, v_BGLD = (x[:, :, slot + stay : slot + tokens] for x in (state.k, state.v))
            _fold(spec.feature_map, params, state, k_BGLD.to(dtype), v_BGLD.to(dtype))
    if capacity > 0:
        state.k[:, :, slot : slot + 1] = k_BG1D
        state.v[:, :, slot : slot + 1] = v_BG1D
    if position < spec.sinks:
        state.sink_k[:, :, position : position + 1] = k_BG1D
        state.sink_v[:, :, position : position + 1] = v_BG1D
    state.position += 1


def _fold(name: str, params: HybridParams, state: HybridState, k_BGLD: Tensor, v_BGLD: Tensor) -> None:
    """Add the given tokens to S and z."""
    assert params.k_weight is not None
    shares = state.S.shape[1] // k_BGLD.shape[1]
    if shares > 1:
        k_BGLD, v_BGLD = k_BGLD.repeat_interleave(shares, 1), v_BGLD.repeat_interleave(shares, 1)
    bias = None if params.k_bias is None else params.k_bias.to(k_BGLD.dtype)
    phi_BSLF = get_feature_map(name)(k_BGLD, params.k_weight.to(k_BGLD.dtype), bias)
    state.S += phi_BSLF.transpose(-1, -2) @ v_BGLD
    state.z += phi_BSLF.sum(-2)


def _features(name: str, x_BHD: Tensor, weight_HDP: Tensor, bias_HP: Tensor | None) -> Tensor:
    """[B, H, F]; one product per head for the whole batch."""
    x_HBD = x_BHD.transpose(0, 1)
    bias = None if bias_HP is None else bias_HP.to(x_BHD.dtype)
    return get_feature_map(name)(x_HBD, weight_HDP.to(x_BHD.dtype), bias).transpose(0, 1)


def _hidden(spec: AttentionConfig, position: int) -> list[tuple[int, int]]:
    """Ranges of [sinks, ring slots] that the query at `position` does not see, its own token written."""
    sinks, capacity = spec.sinks, spec.capacity
    hidden = [(min(position + 1, sinks), sinks)]
    if position + 1 < capacity:  # slots that were never written
        hidden.append((sinks + position + 1, sinks + capacity))
    elif spec.window == "terraced":  # the rest of the own block's slots holds the block that was folded
        slot = position % capacity if capacity else -1
        hidden.append((sinks + slot + 1, sinks + slot + spec.window_size - position % max(spec.window_size, 1)))
    for token in range(max(position + 1 - capacity, 0), min(position + 1, sinks)):  # sinks that are in the ring too
        hidden.append((sinks + token % max(capacity, 1), sinks + token % max(capacity, 1) + 1))
    return [(begin, end) for begin, end in hidden if begin < end and capacity + sinks > 0]


def _per_pair(x_H: Tensor, batch: int, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[B * G, R, 1] from one number per head."""
    x_GR1 = x_H.to(dtype).view(kv_heads, -1, 1)
    return x_GR1 if batch == 1 else x_GR1.repeat(batch, 1, 1)
