"""A sparse cache: keys unlike the others stay exact when they leave the window.

When a block leaves the terraced window, its tokens and those in the cache compete for the cache's slots, each
key/value head for itself. The candidates with the highest scores are retained, the others are evicted and enter S and
z. Cached tokens belong to the softmax part of every query. The state's size is fixed, and a model trained without a
cache can be given one (after LoLA, arXiv:2505.23666, which scores differently). With the mean m and the covariance C
of the keys that left the window so far, those of the present block included, a key's score is its leverage,

    leverage_j = (k_j - m)^T (C + r I)^-1 (k_j - m)

where r is RIDGE times the mean of C's diagonal. Without r these would be the keys' leverage scores, but for a
constant and a factor: only keys of high leverage can get much of a query's weight, whatever the query
(LevAttention, arXiv:2410.05462). r makes them finite while there are fewer keys than dimensions, and keeps the
condition number below D / RIDGE + 1, so that float32 is enough.

Here is the rule for one block; `step` decodes with it, `sparse_chunked` takes many tokens at once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.equation import key_features, repeat_heads
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.state import HybridState

RIDGE = 0.03
SMALLEST_RIDGE = 1e-6  # where all keys are the same, or there are none


def fold_block(config: AttentionConfig, params: HybridParams, state: HybridState, comes_B: Tensor) -> HybridState:
    """The state when the next token begins a block: the oldest block leaves the window, for cache or sums.

    Args:
        comes_B: bool, which sequences get a token. Others, and those inside a block, keep their state.
    """
    leaves_B = comes_B & config.block_leaves(state.position)
    if not leaves_B.is_cuda and not bool(leaves_B.any()):
        return state
    dtype = state.S.dtype
    first_B1 = state.position[:, None] - config.capacity
    position_BL = first_B1 + torch.arange(config.window_size, device=first_B1.device)
    old_k, old_v = (take(x, position_BL % config.capacity) for x in (state.k, state.v))
    k_BGJD = torch.cat([state.cache_k, old_k.to(state.cache_k.dtype)], dim=2)
    v_BGJD = torch.cat([state.cache_v, old_v.to(state.cache_v.dtype)], dim=2)
    slot_C = torch.arange(config.sparse_cache, device=first_B1.device)
    exists_BJ = torch.cat([slot_C < cached(config, state.position - 1)[:, None], position_BL >= config.sinks], dim=1)
    exists_BJ = exists_BJ & leaves_B[:, None]

    before_B = (first_B1[:, 0] - config.sinks).clamp_min(0)
    new_BL = exists_BJ[:, config.sparse_cache :]
    key_moment = _with_block(state.key_moment, before_B, old_k.detach().to(dtype), new_BL)
    score_BGJ = _leverage(key_moment, before_B + new_BL.sum(-1), k_BGJD.detach().to(dtype))
    retained_BGC, evicted_BGL, folds_BGL = compete(score_BGJ, exists_BJ, config.sparse_cache)
    phi_BSJF = key_features(k_BGJD.to(dtype), config, params)
    states = phi_BSJF.shape[1]
    phi_BSLF = pick(phi_BSJF, evicted_BGL) * repeat_heads(folds_BGL, states)[..., None]
    changes = leaves_B[:, None, None, None]
    return replace(
        state,
        S=state.S + phi_BSLF.mT @ repeat_heads(pick(v_BGJD.to(dtype), evicted_BGL), states),
        z=state.z + phi_BSLF.sum(-2),
        cache_k=torch.where(changes, pick(k_BGJD, retained_BGC), state.cache_k),
        cache_v=torch.where(changes, pick(v_BGJD, retained_BGC), state.cache_v),
        key_moment=key_moment,
    )


def compete(score_BGJ: Tensor, exists_BJ: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Who gets a slot, of candidates in the order of age.

    Returns:
        retained [B, G, slots] and evicted [B, G, J - slots], indices of candidates; retained in the order of age,
        those that do not exist last; and which of the evicted exist. Where nobody exists, the first ones are retained.
    """
    exists_BGJ = exists_BJ[:, None].expand_as(score_BGJ)
    order_BGJ = score_BGJ.masked_fill(~exists_BGJ, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    retained_BGC, evicted_BGL = order_BGJ[..., :slots], order_BGJ[..., slots:]
    total = exists_BJ.shape[1]
    retained_BGC = (retained_BGC + total * ~exists_BGJ.gather(2, retained_BGC)).sort(-1).values % total
    return retained_BGC, evicted_BGL, exists_BGJ.gather(2, evicted_BGL)


def covariance_factor(scatter_xDD: Tensor, count_x: Tensor) -> Tensor:
    """Lower Cholesky factor of C + r I, see above, from the sum of `count` products of deviations."""
    covariance_xDD = scatter_xDD / count_x.clamp_min(1)[..., None, None]
    ridge_x1 = RIDGE * covariance_xDD.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    covariance_xDD.diagonal(dim1=-2, dim2=-1).add_(ridge_x1.clamp_min(SMALLEST_RIDGE))
    return torch.linalg.cholesky_ex(covariance_xDD)[0]


def cached(config: AttentionConfig, position: Tensor) -> Tensor:
    """Filled slots of the cache for a query at `position`: the cache fills before anything enters the sums."""
    return (config.window_start(position) - config.sinks).clamp(0, config.sparse_cache)


def pick(x_BGJX: Tensor, index_BGI: Tensor) -> Tensor:
    """[B, S, I, X]: entries by index, for each key/value head its own; state heads may stand in for these."""
    index_BSI = repeat_heads(index_BGI, x_BGJX.shape[1])
    return x_BGJX.gather(2, index_BSI[..., None].expand(-1, -1, -1, x_BGJX.shape[3]))


def take(x_BGTD: Tensor, index_BL: Tensor) -> Tensor:
    """[B, G, L, D]: tokens by index, per sequence."""
    index = index_BL[:, None, :, None].expand(-1, x_BGTD.shape[1], -1, x_BGTD.shape[3])
    return x_BGTD.gather(2, index)


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
        scatter_BGDD + deviation_BGLD.mT @ deviation_BGLD + step_BG1D.mT * (step_BG1D * (before_B111 * share_B111))
    )
    return torch.cat([scatter_BGDD, mean_BG1D + step_BG1D * share_B111], dim=2)


def _leverage(moment_BGAD: Tensor, count_B: Tensor, k_BGJD: Tensor) -> Tensor:
    """[B, G, J] of keys, after `count_B` keys went into the moment."""
    factor_BGDD = covariance_factor(moment_BGAD[..., :-1, :], count_B[:, None])
    deviation_BGJD = k_BGJD - moment_BGAD[..., -1:, :]
    return torch.linalg.solve_triangular(factor_BGDD, deviation_BGJD.mT, upper=False).square().sum(-2)
