"""The parts of the equation (see `lolcats.config.attention`) that the plain implementations share."""

from __future__ import annotations

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.ops.hybrid_attention.params import DENOMINATOR_FLOOR, HybridParams


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, defined where all weights are zero."""
    return numerator / denominator.clamp_min(DENOMINATOR_FLOOR)


def scores(q: Tensor, k: Tensor, scale: float | None, softcap: float | None) -> Tensor:
    """[..., T, D] and [..., J, D] -> [..., T, J], see `HybridParams`."""
    score = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
    return score if softcap is None else softcap * torch.tanh(score / softcap)


def softmax_weights(score: Tensor, seen: Tensor, sink_logit: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """exp(score - c) of the keys that are seen, c the largest of these scores and of the sink logit.

    Args:
        score: [..., J]. Rows that see no key are those of tokens that do not exist; what they get is finite.
        seen: bool, broadcasts with `score`.
        sink_logit: [..., 1], one more score, of a key without a value; None: there is none.

    Returns:
        share [..., J], the weights divided by their sum; mass [..., 1], their sum; total [..., 1], the mass and the
        sink logit's weight.
    """
    score = score.masked_fill(~seen, torch.finfo(score.dtype).min)
    share = score.softmax(-1)
    mass = share.amax(-1, keepdim=True).reciprocal()
    if sink_logit is None:
        return share, mass, mass
    top = score.amax(-1, keepdim=True)
    c = torch.maximum(top, sink_logit)
    mass = mass * (top - c).exp()
    return share, mass, mass + (sink_logit - c).exp()


def repeat_heads(x_BGx: Tensor, heads: int) -> Tensor:
    """[B, G, ...] -> [B, heads, ...]: what neighbouring heads share."""
    return x_BGx if x_BGx.shape[1] == heads else x_BGx.repeat_interleave(heads // x_BGx.shape[1], 1)


def query_features(q_BHTD: Tensor, config: AttentionConfig, params: HybridParams) -> Tensor:
    """phi_q [B, H, T, F] in the type of q."""
    assert config.feature_map is not None
    assert params.q_weight is not None
    bias = None if params.q_bias is None else params.q_bias.to(q_BHTD.dtype)
    return get_feature_map(config.feature_map)(q_BHTD, params.q_weight.to(q_BHTD.dtype), bias)


def key_features(k_BGTD: Tensor, config: AttentionConfig, params: HybridParams) -> Tensor:
    """phi_k [B, S, T, F] in the type of k."""
    assert config.feature_map is not None
    assert params.k_weight is not None
    bias = None if params.k_bias is None else params.k_bias.to(k_BGTD.dtype)
    k_BSTD = repeat_heads(k_BGTD, params.k_weight.shape[0])
    return get_feature_map(config.feature_map)(k_BSTD, params.k_weight.to(k_BGTD.dtype), bias)


def attend(
    q_BHLD: Tensor,
    key_BGJD: Tensor,
    value_BGJD: Tensor,
    seen_BLJ: Tensor,
    position_BL: Tensor,
    S: Tensor,
    z: Tensor,
    config: AttentionConfig,
    params: HybridParams,
) -> Tensor:
    """Outputs [B, H, L, D] of queries whose linear part is the state S, z; q, keys and values in the type of S.

    Args:
        key_BGJD, value_BGJD: what may be in the softmax part; J may be 0.
        seen_BLJ: bool, what is in the softmax part of each query.
        position_BL: of the queries in their sequences.
    """
    B, H, L, _ = q_BHLD.shape

    def rows(x_BHLX: Tensor, groups: int) -> Tensor:
        """[B, groups, M, X]: the queries of all heads that share keys, or a state."""
        return x_BHLX.reshape(B, groups, H // groups * L, x_BHLX.shape[-1])

    def unrows(x_BGMX: Tensor) -> Tensor:
        return x_BGMX.reshape(B, H, L, x_BGMX.shape[-1])

    parts = []
    if config.has_softmax:
        groups = key_BGJD.shape[1]
        score_BHLJ = unrows(scores(rows(q_BHLD, groups), key_BGJD, params.scale, params.softcap))
        sink_H11 = None if params.sink_logits is None else params.sink_logits.to(q_BHLD.dtype)[:, None, None]
        share_BHLJ, mass_BHL1, total_BHL1 = softmax_weights(score_BHLJ, seen_BLJ[:, None], sink_H11)
        gamma = config.gamma_at(params.gamma.to(q_BHLD.dtype)[:, None, None], position_BL[:, None, :, None])
        mean_BHLD = unrows(rows(share_BHLJ, groups) @ value_BGJD)
        parts.append((gamma * mass_BHL1 * mean_BHLD, gamma * total_BHL1))
    if config.feature_map is not None:
        phi_BSMF = rows(query_features(q_BHLD, config, params), S.shape[1])
        parts.append((unrows(phi_BSMF @ S), unrows(phi_BSMF @ z[..., None])))
    numerators, denominators = zip(*parts, strict=True)
    return quotient(sum(numerators[1:], numerators[0]), sum(denominators[1:], denominators[0]))
