"""The parts of the equation (see `lolcats.config.attention`) that the plain implementations share."""

from __future__ import annotations

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.feature_maps import FEATURE_MAPS
from lolcats.ops.hybrid_attention.state import DENOMINATOR_FLOOR, HybridParams


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, defined where all weights are zero."""
    return numerator / denominator.clamp_min(DENOMINATOR_FLOOR)


def scores(q: Tensor, k: Tensor, params: HybridParams) -> Tensor:
    """[..., T, D] and [..., J, D] -> [..., T, J], see `HybridParams`."""
    score, softcap = (q * params.scale_of(q)) @ k.mT, params.softcap
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
    return FEATURE_MAPS[config.feature_map](q_BHTD, params.q_weight, params.q_bias)


def key_features(k_BGTD: Tensor, config: AttentionConfig, params: HybridParams) -> Tensor:
    """phi_k [B, S, T, F] in the type of k."""
    assert config.feature_map is not None
    assert params.k_weight is not None
    k_BSTD = repeat_heads(k_BGTD, params.k_weight.shape[0])
    return FEATURE_MAPS[config.feature_map](k_BSTD, params.k_weight, params.k_bias)
