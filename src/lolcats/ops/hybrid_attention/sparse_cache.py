"""Hybrid attention with a sparse cache: keys that the state would serve badly stay exact.

When a block leaves the terraced window, its tokens and those in the cache compete for the cache's slots, each
key/value head for itself. The candidates that score highest are kept, and the others enter S and z. Cached tokens
belong to the softmax part of every query. The state's size is fixed, and a model trained without a cache can be
given one. `cache_by` names the score:

"recall" (LoLA, arXiv:2505.23666): the state S, z before is asked for each candidate's value,

    error_j = | phi_k(k_j) . S / phi_k(k_j) . z - v_j |^2

added up over the state heads of a key/value head.

"leverage": with the mean m and the covariance C of the keys that left the window so far, those of the present block
included,

    leverage_j = (k_j - m)^T (C + r I)^-1 (k_j - m)

where r is RIDGE times the mean of C's diagonal. Without r these would be the keys' leverage scores, but for a
constant and a factor: only keys of high leverage can get much of a query's weight, whatever the query
(LevAttention, arXiv:2410.05462). r makes them finite while there are fewer keys than dimensions, and keeps the
condition number below D / RIDGE + 1, so that float32 is enough.

Tokens are taken block by block; one token is a short block, so this serves prefill, training and decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.ops.hybrid_attention.spec import DENOMINATOR_FLOOR
from lolcats.ops.hybrid_attention.spec import HybridParams
from lolcats.ops.hybrid_attention.spec import HybridSpec
from lolcats.ops.hybrid_attention.state import HybridState
from lolcats.ops.hybrid_attention.state import accumulation_dtype
from lolcats.ops.hybrid_attention.state import push_tokens
from lolcats.ops.hybrid_attention.state import ring_positions

RIDGE = 0.03
PARTS_AT_ONCE = 16  # parts of the sequence whose queries are answered together; bounds the copies of states
SMALLEST_RIDGE = 1e-6  # where all keys are the same, or there are none


def sparse_cached(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    spec: HybridSpec,
    params: HybridParams,
    *,
    scale: float,
    softcap: float | None,
    state: HybridState,
    fresh: bool = True,
    length_B: Tensor | None = None,
    need_state: bool = True,
    block: int | None = None,
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`; token t of sequence b is real iff t < length_B[b] (None: all are).

    Args:
        fresh: the state is the initial one.
        need_state: as other implementations take it; here it saves nothing.
        block: take so many tokens at once, a divisor of the window size (None: all of it); the result is the same.
    """
    tokens, size = q_BHTD.shape[2], block or spec.window_size
    if tokens == 0:
        return q_BHTD, state
    if length_B is None:
        length_B = torch.full_like(state.position, tokens)
    # Token t of sequence b is in part (offset_B + t) // size; the first part may be a short one.
    offset_B1 = (state.position % size)[:, None]
    offset = 0 if fresh or tokens == 1 else int(offset_B1.max())
    parts = (offset + tokens + size - 1) // size
    width = min(size, tokens)
    slot_L = torch.arange(width, device=q_BHTD.device)
    outputs: list[Tensor] = []
    waiting: list[_Part] = []
    for part in range(parts):
        begin_B1 = (part * size - offset_B1).clamp_min(0)
        end_B1 = torch.minimum((part + 1) * size - offset_B1, length_B[:, None])
        index_BL = begin_B1 + slot_L
        count_B = (end_B1 - begin_B1).clamp_min(0)[:, 0]
        q, k, v = (_take(x, index_BL.clamp_max(tokens - 1)) for x in (q_BHTD, k_BGTD, v_BGTD))
        state = fold_block(spec, params, state, count_B > 0)
        waiting.append((q, k, v, state, count_B))
        if len(waiting) == PARTS_AT_ONCE or part == parts - 1:
            outputs += _attend_parts(waiting, spec, params, scale, softcap)
            waiting.clear()
        state = push_tokens(state, spec, k, v, count_B)
    t_T = torch.arange(tokens, device=q_BHTD.device)
    part_BT = (offset_B1 + t_T) // size
    slot_BT = torch.where(part_BT == 0, t_T, (offset_B1 + t_T) % size)
    y_BHTD = _take(torch.cat(outputs, dim=2), part_BT * width + slot_BT)
    real_BT = t_T < length_B[:, None]
    return y_BHTD.masked_fill(~real_BT[:, None, :, None], 0.0).to(q_BHTD.dtype), state


def fold_block(spec: HybridSpec, params: HybridParams, state: HybridState, comes_B: Tensor) -> HybridState:
    """The state when the next token begins a block: the oldest block leaves the window, for cache or sums.

    Args:
        comes_B: bool, which sequences get a token. Others, and those inside a block, keep their state.
    """
    leaves_B = comes_B & (state.position % spec.window_size == 0) & (state.position >= spec.capacity)
    if not leaves_B.is_cuda and not bool(leaves_B.any()):
        return state
    assert spec.feature_map is not None
    assert params.k_weight is not None
    dtype = state.S.dtype
    first_B1 = state.position[:, None] - spec.capacity
    position_BL = first_B1 + torch.arange(spec.window_size, device=first_B1.device)
    old_k, old_v = (_take(x, position_BL % spec.capacity) for x in (state.k, state.v))
    k_BGJD = torch.cat([state.cache_k, old_k.to(state.cache_k.dtype)], dim=2)
    v_BGJD = torch.cat([state.cache_v, old_v.to(state.cache_v.dtype)], dim=2)
    slot_C = torch.arange(spec.sparse_cache, device=first_B1.device)
    exists_BJ = torch.cat([slot_C < cached(spec, state.position - 1)[:, None], position_BL >= spec.sinks], dim=1)
    exists_BJ = exists_BJ & leaves_B[:, None]

    groups = k_BGJD.shape[1]
    shares = state.S.shape[1] // groups
    bias = None if params.k_bias is None else params.k_bias.to(dtype)
    k_BSJD, v_BSJD = (x.to(dtype).repeat_interleave(shares, 1) for x in (k_BGJD, v_BGJD))
    phi_BSJF = get_feature_map(spec.feature_map)(k_BSJD, params.k_weight.to(dtype), bias)
    if spec.cache_by == "recall":
        key_moment = state.key_moment
        recalled_BSJD = phi_BSJF @ state.S / (phi_BSJF @ state.z[..., None]).clamp_min(DENOMINATOR_FLOOR)
        score_BGJ = (recalled_BSJD - v_BSJD).square().sum(-1).unflatten(1, (groups, shares)).sum(2)
    else:
        before_B = (first_B1[:, 0] - spec.sinks).clamp_min(0)
        new_BL = exists_BJ[:, spec.sparse_cache :]
        key_moment = _with_block(state.key_moment, before_B, old_k.detach().to(dtype), new_BL)
        score_BGJ = _leverage(key_moment, before_B + new_BL.sum(-1), k_BGJD.detach().to(dtype))
    score_BGJ = score_BGJ.detach().masked_fill(~exists_BJ[:, None], -torch.inf)
    kept_BGC = score_BGJ.argsort(dim=-1, descending=True, stable=True)[..., : spec.sparse_cache]

    # Slots in the order of age, empty ones last.
    total = exists_BJ.shape[1]
    exists_BGJ = exists_BJ[:, None].expand(-1, groups, -1)
    kept_BGC = (kept_BGC + total * ~exists_BGJ.gather(2, kept_BGC)).sort(-1).values % total
    is_kept_BGJ = torch.zeros_like(exists_BGJ).scatter(2, kept_BGC, True)
    folds_BSJ = (exists_BGJ & ~is_kept_BGJ).repeat_interleave(shares, 1)
    phi_BSJF = phi_BSJF * folds_BSJ[..., None]
    index = kept_BGC[..., None].expand(-1, -1, -1, k_BGJD.shape[3])
    changes = leaves_B[:, None, None, None]
    return replace(
        state,
        S=state.S + phi_BSJF.transpose(-1, -2) @ v_BSJD,
        z=state.z + phi_BSJF.sum(-2),
        cache_k=torch.where(changes, k_BGJD.gather(2, index), state.cache_k),
        cache_v=torch.where(changes, v_BGJD.gather(2, index), state.cache_v),
        key_moment=key_moment,
    )


def _with_block(moment_BGAD: Tensor, before_B: Tensor, k_BGLD: Tensor, new_BL: Tensor) -> Tensor:
    """`HybridState.key_moment` with the new ones of `k_BGLD`, where it had `before_B` keys.

    Deviations are taken from the mean of the block, and then of the two means from each other: the difference of two
    large sums would lose the covariance of keys whose mean is far from zero, as biases make them.
    """
    scatter_BGDD, mean_BG1D = moment_BGAD[..., :-1, :], moment_BGAD[..., -1:, :]
    new_B1L1 = new_BL[:, None, :, None]
    before_B111, added_B111 = (
        count.to(moment_BGAD.dtype) for count in (before_B[:, None, None, None], new_B1L1.sum(2, keepdim=True))
    )
    block_mean_BG1D = k_BGLD.where(new_B1L1, 0.0).sum(2, keepdim=True) / added_B111.clamp_min(1)
    deviation_BGLD = (k_BGLD - block_mean_BG1D).where(new_B1L1, 0.0)
    step_BG1D = block_mean_BG1D - mean_BG1D
    share_B111 = added_B111 / (before_B111 + added_B111).clamp_min(1)
    scatter_BGDD = (
        scatter_BGDD
        + deviation_BGLD.transpose(-1, -2) @ deviation_BGLD
        + step_BG1D.transpose(-1, -2) * (step_BG1D * (before_B111 * share_B111))
    )
    return torch.cat([scatter_BGDD, mean_BG1D + step_BG1D * share_B111], dim=2)


def _leverage(moment_BGAD: Tensor, count_B: Tensor, k_BGJD: Tensor) -> Tensor:
    """[B, G, J] of keys, after `count_B` keys went into the moment."""
    covariance_BGDD = moment_BGAD[..., :-1, :] / count_B.clamp_min(1)[:, None, None, None]
    ridge_BG1 = RIDGE * covariance_BGDD.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    ridge_BGD = ridge_BG1.clamp_min(SMALLEST_RIDGE).expand(-1, -1, k_BGJD.shape[3])
    factor_BGDD, _ = torch.linalg.cholesky_ex(covariance_BGDD + torch.diag_embed(ridge_BGD))
    deviation_BGJD = k_BGJD - moment_BGAD[..., -1:, :]
    return torch.linalg.solve_triangular(factor_BGDD, deviation_BGJD.mT, upper=False).square().sum(-2)


def cached(spec: HybridSpec, position: Tensor) -> Tensor:
    """Filled slots of the cache for a query at `position`: the cache fills before anything enters the sums."""
    return (spec.window_start(position) - spec.sinks).clamp(0, spec.sparse_cache)


_Part = tuple[Tensor, Tensor, Tensor, HybridState, Tensor]
"""q, k, v, the state after `fold_block`, and the number of tokens of each sequence."""


def _attend_parts(
    parts: list[_Part], spec: HybridSpec, params: HybridParams, scale: float, softcap: float | None
) -> Sequence[Tensor]:
    """`_attend` of each part. Once the states are known nothing runs from part to part: parts lie in the batch."""
    if len(parts) == 1:
        q, k, v, state, count_B = parts[0]
        return [_attend(q, k, v, spec, params, scale, softcap, state, count_B)]
    qs, ks, vs, states, counts = zip(*parts, strict=True)
    tensors = [replace(state, key_moment=state.key_moment[:0]).tensors() for state in states]  # `fold_block`'s alone
    state = HybridState(**{name: torch.cat([each[name] for each in tensors]) for name in tensors[0]})
    q, k, v, count_B = (torch.cat(xs) for xs in (qs, ks, vs, counts))
    return _attend(q, k, v, spec, params, scale, softcap, state, count_B).chunk(len(parts))


def _attend(
    q_BHLD: Tensor,
    k_BGLD: Tensor,
    v_BGLD: Tensor,
    spec: HybridSpec,
    params: HybridParams,
    scale: float,
    softcap: float | None,
    state: HybridState,
    count_B: Tensor,
) -> Tensor:
    """Outputs [B, H, L, D] of the next `count_B` tokens, all of one block, after `fold_block`."""
    dtype = accumulation_dtype(q_BHLD.dtype)
    heads, groups = q_BHLD.shape[1], k_BGLD.shape[1]
    position_B1 = state.position[:, None]
    new_L = torch.arange(q_BHLD.shape[2], device=q_BHLD.device)
    ring_BC = ring_positions(state.position, spec.capacity)
    # Keys before these tokens, which all queries see; then the new ones, causally.
    sees_BJ = torch.cat(
        [
            torch.arange(spec.sinks, device=new_L.device) < position_B1,
            torch.arange(spec.sparse_cache, device=new_L.device) < cached(spec, position_B1),
            (ring_BC >= spec.window_start(position_B1)) & (ring_BC >= spec.sinks),
        ],
        dim=1,
    )
    causal_BLL = (new_L <= new_L[:, None]) & (new_L < count_B[:, None, None])
    sees_BLJ = torch.cat([sees_BJ[:, None].expand(-1, len(new_L), -1), causal_BLL], dim=2)
    key_BGJD = torch.cat([x.to(dtype) for x in (state.sink_k, state.cache_k, state.k, k_BGLD)], dim=2)
    value_BGJD = torch.cat([x.to(dtype) for x in (state.sink_v, state.cache_v, state.v, v_BGLD)], dim=2)

    q_BHLD = q_BHLD.to(dtype)
    score_BGRLJ = q_BHLD.unflatten(1, (groups, -1)) @ key_BGJD[:, :, None].transpose(-1, -2) * scale
    if softcap is not None:
        score_BGRLJ = softcap * torch.tanh(score_BGRLJ / softcap)
    score_BGRLJ = score_BGRLJ.masked_fill(~sees_BLJ[:, None, None], -torch.inf)
    top_BGRL1 = score_BGRLJ.amax(-1, keepdim=True)
    gamma_GR11 = params.gamma.to(dtype).view(groups, -1, 1, 1)
    denominator = torch.zeros((), dtype=dtype, device=q_BHLD.device)
    if params.sink_logits is not None:
        logit_GR11 = params.sink_logits.to(dtype).view(groups, -1, 1, 1)
        top_BGRL1 = torch.maximum(top_BGRL1, logit_GR11)
        denominator = gamma_GR11 * (logit_GR11 - top_BGRL1).exp()
    top_BGRL1 = torch.where(top_BGRL1.isfinite(), top_BGRL1, 0.0)  # tokens that do not exist
    weight_BGRLJ = gamma_GR11 * (score_BGRLJ - top_BGRL1).exp()
    numerator = weight_BGRLJ @ value_BGJD[:, :, None]
    denominator = denominator + weight_BGRLJ.sum(-1, keepdim=True)

    assert spec.feature_map is not None
    assert params.q_weight is not None
    bias = None if params.q_bias is None else params.q_bias.to(dtype)
    phi_BHLF = get_feature_map(spec.feature_map)(q_BHLD, params.q_weight.to(dtype), bias)
    phi_BSRLF = phi_BHLF.unflatten(1, (state.S.shape[1], -1))
    numerator = numerator.flatten(1, 2) + (phi_BSRLF @ state.S[:, :, None]).flatten(1, 2)
    denominator = denominator.flatten(1, 2) + (phi_BSRLF @ state.z[:, :, None, :, None]).flatten(1, 2)
    assert numerator.shape[1] == heads
    return numerator / denominator.clamp_min(DENOMINATOR_FLOOR)


def _take(x_BGTD: Tensor, index_BL: Tensor) -> Tensor:
    """Tokens by index, per sequence: [B, G, L, D]."""
    index = index_BL[:, None, :, None].expand(-1, x_BGTD.shape[1], -1, x_BGTD.shape[3])
    return x_BGTD.gather(2, index)
