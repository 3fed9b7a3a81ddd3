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

Here is the rule, and the tokens one after another: the reference and decoding. `sparse_chunked` takes many at once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.ops.hybrid_attention.params import DENOMINATOR_FLOOR, HybridParams
from lolcats.ops.hybrid_attention.state import HybridState, accumulation_dtype, push_tokens, ring_positions

RIDGE = 0.03
SMALLEST_RIDGE = 1e-6  # where all keys are the same, or there are none


def sparse_cached(
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
    block_evicted: bool = True,
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`; token t of sequence b is real iff t < length_B[b] (None: all are).

    `block_evicted`: False, if the caller knows that no block leaves the window at any of these tokens. `fresh` and
    `need_state` are what other implementations take; here they save nothing.
    """
    if q_BHTD.shape[2] == 0:
        return q_BHTD, state
    if length_B is None:
        length_B = torch.full_like(state.position, q_BHTD.shape[2])
    outputs = []
    for t in range(q_BHTD.shape[2]):
        q, k, v = (x[:, :, t : t + 1] for x in (q_BHTD, k_BGTD, v_BGTD))
        count_B = (length_B > t).long()
        if block_evicted:
            state = fold_block(spec, params, state, count_B > 0)
        y_BH1D = _attend_one(q, k, v, spec, params, scale, softcap, state)
        outputs.append(y_BH1D.masked_fill((count_B == 0)[:, None, None, None], 0.0))
        state = push_tokens(state, spec, k, v, count_B)
    return torch.cat(outputs, dim=2).to(q_BHTD.dtype), state


def fold_block(spec: AttentionConfig, params: HybridParams, state: HybridState, comes_B: Tensor) -> HybridState:
    """The state when the next token begins a block: the oldest block leaves the window, for cache or sums.

    Args:
        comes_B: bool, which sequences get a token. Others, and those inside a block, keep their state.
    """
    leaves_B = comes_B & spec.block_leaves(state.position)
    if not leaves_B.is_cuda and not bool(leaves_B.any()):
        return state
    dtype, groups = state.S.dtype, state.cache_k.shape[1]
    first_B1 = state.position[:, None] - spec.capacity
    position_BL = first_B1 + torch.arange(spec.window_size, device=first_B1.device)
    old_k, old_v = (take(x, position_BL % spec.capacity) for x in (state.k, state.v))
    k_BGJD = torch.cat([state.cache_k, old_k.to(state.cache_k.dtype)], dim=2)
    v_BGJD = torch.cat([state.cache_v, old_v.to(state.cache_v.dtype)], dim=2)
    slot_C = torch.arange(spec.sparse_cache, device=first_B1.device)
    exists_BJ = torch.cat([slot_C < cached(spec, state.position - 1)[:, None], position_BL >= spec.sinks], dim=1)
    exists_BJ = exists_BJ & leaves_B[:, None]

    phi_BSJF, v_BSJD = key_features(k_BGJD.to(dtype), spec, params), per_state(v_BGJD.to(dtype), params)
    key_moment = state.key_moment
    if spec.cache_by == "recall":
        score_BGJ = recall_error(phi_BSJF, v_BSJD, state.S, state.z, groups)
    else:
        before_B = (first_B1[:, 0] - spec.sinks).clamp_min(0)
        new_BL = exists_BJ[:, spec.sparse_cache :]
        key_moment = _with_block(key_moment, before_B, old_k.detach().to(dtype), new_BL)
        score_BGJ = _leverage(key_moment, before_B + new_BL.sum(-1), k_BGJD.detach().to(dtype))
    kept_BGC, gone_BGL, folds_BGL = compete(score_BGJ.detach(), exists_BJ, spec.sparse_cache)
    phi_BSLF = pick(phi_BSJF, gone_BGL) * per_state(folds_BGL, params)[..., None]
    changes = leaves_B[:, None, None, None]
    return replace(
        state,
        S=state.S + phi_BSLF.mT @ pick(v_BSJD, gone_BGL),
        z=state.z + phi_BSLF.sum(-2),
        cache_k=torch.where(changes, pick(k_BGJD, kept_BGC), state.cache_k),
        cache_v=torch.where(changes, pick(v_BGJD, kept_BGC), state.cache_v),
        key_moment=key_moment,
    )


def compete(score_BGJ: Tensor, exists_BJ: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Who gets a slot, of candidates in the order of age.

    Returns:
        kept [B, G, slots] and gone [B, G, J - slots], indices of candidates; kept in the order of age, those that do
        not exist last; and which of the gone exist. Where nobody exists, the first ones keep their slots.
    """
    exists_BGJ = exists_BJ[:, None].expand_as(score_BGJ)
    order_BGJ = score_BGJ.masked_fill(~exists_BGJ, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    kept_BGC, gone_BGL = order_BGJ[..., :slots], order_BGJ[..., slots:]
    total = exists_BJ.shape[1]
    kept_BGC = (kept_BGC + total * ~exists_BGJ.gather(2, kept_BGC)).sort(-1).values % total
    return kept_BGC, gone_BGL, exists_BGJ.gather(2, gone_BGL)


def recall_error(phi_BSJF: Tensor, v_BSJD: Tensor, S: Tensor, z: Tensor, groups: int) -> Tensor:
    """[B, G, J] squared error with which a state gives back values, added up over a group's states."""
    recalled_BSJD = phi_BSJF @ S / (phi_BSJF @ z[..., None]).clamp_min(DENOMINATOR_FLOOR)
    return (recalled_BSJD - v_BSJD).square().sum(-1).unflatten(1, (groups, -1)).sum(2)


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
    factor_BGDD = covariance_factor(moment_BGAD[..., :-1, :], count_B[:, None])
    deviation_BGJD = k_BGJD - moment_BGAD[..., -1:, :]
    return torch.linalg.solve_triangular(factor_BGDD, deviation_BGJD.mT, upper=False).square().sum(-2)


def covariance_factor(scatter_xDD: Tensor, count_x: Tensor) -> Tensor:
    """Lower Cholesky factor of C + r I, see above, from the sum of `count` products of deviations."""
    covariance_xDD = scatter_xDD / count_x.clamp_min(1)[..., None, None]
    ridge_x1 = RIDGE * covariance_xDD.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    covariance_xDD.diagonal(dim1=-2, dim2=-1).add_(ridge_x1.clamp_min(SMALLEST_RIDGE))
    return torch.linalg.cholesky_ex(covariance_xDD)[0]


def cached(spec: AttentionConfig, position: Tensor) -> Tensor:
    """Filled slots of the cache for a query at `position`: the cache fills before anything enters the sums."""
    return (spec.window_start(position) - spec.sinks).clamp(0, spec.sparse_cache)


def _attend_one(
    q_BH1D: Tensor,
    k_BG1D: Tensor,
    v_BG1D: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    scale: float,
    softcap: float | None,
    state: HybridState,
) -> Tensor:
    """Outputs [B, H, 1, D] of the next token, after `fold_block`."""
    position_B1 = state.position[:, None]
    ring_BC = ring_positions(state.position, spec.capacity)
    sees_BJ = torch.cat(
        [
            torch.arange(spec.sinks, device=ring_BC.device) < position_B1,
            torch.arange(spec.sparse_cache, device=ring_BC.device) < cached(spec, position_B1),
            (ring_BC >= spec.window_start(position_B1)) & (ring_BC >= spec.sinks),
            torch.ones_like(position_B1, dtype=torch.bool),
        ],
        dim=1,
    )
    dtype = accumulation_dtype(q_BH1D.dtype)
    key_BGJD = torch.cat([x.to(dtype) for x in (state.sink_k, state.cache_k, state.k, k_BG1D)], dim=2)
    value_BGJD = torch.cat([x.to(dtype) for x in (state.sink_v, state.cache_v, state.v, v_BG1D)], dim=2)
    q_BH1D = q_BH1D.to(dtype)
    hidden_B1J = ~sees_BJ[:, None]
    return attend(q_BH1D, key_BGJD, value_BGJD, hidden_B1J, position_B1, state.S, state.z, spec, params, scale, softcap)


def attend(
    q_BHLD: Tensor,
    key_BGJD: Tensor,
    value_BGJD: Tensor,
    hidden_BLJ: Tensor,
    position_BL: Tensor,
    S: Tensor,
    z: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Outputs [B, H, L, D] of queries that all have the same linear part; all in the type of S.

    Rows M are the queries of all heads that share keys, or a state.
    """
    assert spec.feature_map is not None
    assert params.q_weight is not None
    dtype, heads = q_BHLD.dtype, q_BHLD.shape[1:3]

    def rows(x_BHLX: Tensor, groups: int) -> Tensor:
        return x_BHLX.unflatten(1, (groups, -1)).flatten(2, 3)

    def unrows(x_BGMX: Tensor) -> Tensor:
        return x_BGMX.flatten(1, 2).unflatten(1, heads)

    score_BHLJ = unrows(rows(q_BHLD, key_BGJD.shape[1]) @ key_BGJD.mT) * scale
    if softcap is not None:
        score_BHLJ = softcap * torch.tanh(score_BHLJ / softcap)
    score_BHLJ = score_BHLJ.masked_fill(hidden_BLJ[:, None], -torch.inf)
    top_BHL1 = score_BHLJ.amax(-1, keepdim=True).clamp_min(torch.finfo(dtype).min)  # some tokens do not exist
    gamma_BHL1 = spec.gamma_at(params.gamma.to(dtype)[:, None, None], position_BL[:, None, :, None])
    if params.sink_logits is not None:
        logit_H11 = params.sink_logits.to(dtype)[:, None, None]
        top_BHL1 = torch.maximum(top_BHL1, logit_H11)
    weight_BHLJ = gamma_BHL1 * (score_BHLJ - top_BHL1).exp()
    numerator = unrows(rows(weight_BHLJ, value_BGJD.shape[1]) @ value_BGJD)
    denominator = weight_BHLJ.sum(-1, keepdim=True)
    if params.sink_logits is not None:
        denominator = gamma_BHL1 * (logit_H11 - top_BHL1).exp() + denominator

    bias = None if params.q_bias is None else params.q_bias.to(dtype)
    phi_BHLF = get_feature_map(spec.feature_map)(q_BHLD, params.q_weight.to(dtype), bias)
    phi_BSMF = rows(phi_BHLF, S.shape[1])
    numerator = numerator + unrows(phi_BSMF @ S)
    denominator = denominator + unrows(phi_BSMF @ z[..., None])
    return numerator / denominator.clamp_min(DENOMINATOR_FLOOR)


def key_features(k_BGJD: Tensor, spec: AttentionConfig, params: HybridParams) -> Tensor:
    """phi_k [B, S, J, F]."""
    assert spec.feature_map is not None
    assert params.k_weight is not None
    bias = None if params.k_bias is None else params.k_bias.to(k_BGJD.dtype)
    return get_feature_map(spec.feature_map)(per_state(k_BGJD, params), params.k_weight.to(k_BGJD.dtype), bias)


def per_state(x_BGx: Tensor, params: HybridParams) -> Tensor:
    """[B, G, ...] -> [B, S, ...]: what the state heads of a key/value head share."""
    assert params.k_weight is not None
    return _repeated(x_BGx, params.k_weight.shape[0])


def _repeated(x_BGx: Tensor, heads: int) -> Tensor:
    return x_BGx if x_BGx.shape[1] == heads else x_BGx.repeat_interleave(heads // x_BGx.shape[1], 1)


def pick(x_BSJX: Tensor, index_BGI: Tensor) -> Tensor:
    """[B, S, I, X]: entries by index, for each key/value head its own."""
    index_BSI = _repeated(index_BGI, x_BSJX.shape[1])
    return x_BSJX.gather(2, index_BSI[..., None].expand(-1, -1, -1, x_BSJX.shape[3]))


def take(x_BGTD: Tensor, index_BL: Tensor) -> Tensor:
    """[B, G, L, D]: tokens by index, per sequence."""
    index = index_BL[:, None, :, None].expand(-1, x_BGTD.shape[1], -1, x_BGTD.shape[3])
    return x_BGTD.gather(2, index)
