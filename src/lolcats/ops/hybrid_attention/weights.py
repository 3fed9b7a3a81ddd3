"""Attention-weight matrices of hybrid and softmax attention: quadratic, for losses and pictures of weights."""

from __future__ import annotations

import torch
from torch import Tensor

from lolcats.ops.hybrid_attention.ragged import rows_from_mask
from lolcats.ops.hybrid_attention.ragged import rows_from_segments
from lolcats.ops.hybrid_attention.reference import reference_weights
from lolcats.ops.hybrid_attention.spec import DENOMINATOR_FLOOR
from lolcats.ops.hybrid_attention.spec import HybridParams
from lolcats.ops.hybrid_attention.spec import HybridSpec
from lolcats.ops.hybrid_attention.state import accumulation_dtype


def attention_weights(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    spec: HybridSpec,
    params: HybridParams,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised weights of hybrid attention and of the softmax attention that it stands for.

    With `mask` or `segment_ids` the rows are the single sequences, left-aligned (N of them, L tokens long);
    otherwise N = B and L = T. Arguments as `hybrid_attention`; `sliding_window` limits the softmax only.

    Returns:
        hybrid [N, H, L, L], softmax [N, H, L, L] (rows sum to 1; less with `params.sink_logits`), and the
        lengths [N] of the rows.

    Raises:
        ValueError: weights of `spec` cannot be written out: with a sparse cache they depend on the values, and
            with decay or GroupNorm they are not those of a mean.
    """
    if spec.is_retention:
        raise ValueError("weights of attention with decay or GroupNorm are not those of a mean of values")
    if spec.sparse_cache:
        raise ValueError(
            f"weights cannot be written out with sparse_cache={spec.sparse_cache}, which depends on the values;"
            " set it to 0"
        )
    rows = None
    if segment_ids is not None:
        rows = rows_from_segments(segment_ids)
    elif mask is not None:
        rows = rows_from_mask(mask)
    if rows is not None:
        q_BHTD, k_BGTD = rows.align(q_BHTD), rows.align(k_BGTD)
    count, heads, tokens, _ = q_BHTD.shape
    dtype = accumulation_dtype(q_BHTD.dtype)
    q = q_BHTD.to(dtype)
    k = k_BGTD.to(dtype).repeat_interleave(heads // k_BGTD.shape[1], 1)
    position_NT = torch.arange(tokens, device=q.device).expand(count, -1)
    length_N = torch.full((count,), tokens, device=q.device) if rows is None else rows.length_N
    valid_NT = position_NT < length_N[:, None]

    softmax_part, linear_part, extra = reference_weights(
        q, k, spec, params, position_NT, position_NT, valid_NT, scale, softcap
    )
    weight = softmax_part + linear_part
    hybrid = weight / (weight.sum(-1, keepdim=True) + extra).clamp_min(DENOMINATOR_FLOOR)

    everything = HybridSpec("sliding", window_size=sliding_window or max(tokens, 1), feature_map=None)
    softmax_part, _, extra = reference_weights(
        q, k, everything, params, position_NT, position_NT, valid_NT, scale, softcap
    )
    softmax = softmax_part / (softmax_part.sum(-1, keepdim=True) + extra).clamp_min(DENOMINATOR_FLOOR)
    return hybrid, softmax, length_N


def weights_cross_entropy(
    q_BHTD: Tensor, k_BGTD: Tensor, spec: HybridSpec, params: HybridParams, **layout: object
) -> Tensor:
    """Mean over heads and real queries of -sum_j softmax_nj log hybrid_nj (arXiv:2402.04347); a scalar."""
    with torch.autocast(q_BHTD.device.type, enabled=False):
        hybrid, softmax, length_N = attention_weights(q_BHTD, k_BGTD, spec, params, **layout)  # type: ignore[arg-type]
        # Entries without softmax weight drop out; the floor keeps the logarithm of the others finite.
        cross_NHT = -(softmax.detach() * hybrid.clamp_min(DENOMINATOR_FLOOR).log()).sum(-1)
    real_NT = torch.arange(cross_NHT.shape[-1], device=cross_NHT.device) < length_N[:, None]
    return (cross_NHT * real_NT[:, None]).sum() / (real_NT.sum() * cross_NHT.shape[1])
