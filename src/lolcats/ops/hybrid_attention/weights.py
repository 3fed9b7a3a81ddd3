"""Attention-weight matrices of hybrid and softmax attention: quadratic, for pictures of weights and as a definition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.params import DENOMINATOR_FLOOR, HybridParams
from lolcats.ops.hybrid_attention.ragged import rows_from_mask, rows_from_segments
from lolcats.ops.hybrid_attention.reference import reference_weights
from lolcats.ops.hybrid_attention.state import accumulation_dtype


def attention_weights(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    spec: AttentionConfig,
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
    rows = AlignedRows.of(q_BHTD, k_BGTD, spec, mask, segment_ids)
    hybrid, softmax = rows.weights(0, rows.q.shape[2], spec, params, scale, softcap, sliding_window)
    return hybrid, softmax, rows.length_N


@dataclass(frozen=True)
class AlignedRows:
    """Queries and keys [N, H, L, D] of single sequences in the accumulation type, left-aligned; their lengths."""

    q: Tensor
    k: Tensor
    length_N: Tensor
    position_NT: Tensor
    valid_NT: Tensor

    @classmethod
    def of(
        cls, q_BHTD: Tensor, k_BGTD: Tensor, spec: AttentionConfig, mask: Tensor | None, segment_ids: Tensor | None
    ) -> AlignedRows:
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
        position_NT = torch.arange(tokens, device=q_BHTD.device).expand(count, -1)
        length_N = torch.full((count,), tokens, device=q_BHTD.device) if rows is None else rows.length_N
        return cls(
            q=q_BHTD.to(dtype),
            k=k_BGTD.to(dtype).repeat_interleave(heads // k_BGTD.shape[1], 1),
            length_N=length_N,
            position_NT=position_NT,
            valid_NT=position_NT < length_N[:, None],
        )

    def weights(
        self,
        begin: int,
        end: int,
        spec: AttentionConfig,
        params: HybridParams,
        scale: float,
        softcap: float | None,
        sliding_window: int | None,
    ) -> tuple[Tensor, Tensor]:
        """Hybrid and softmax weights of queries `begin` to `end` over the keys up to them: [N, H, end - begin, end]."""
        q, k = self.q[:, :, begin:end], self.k[:, :, :end]
        position_NT, valid_NT = self.position_NT[:, :end], self.valid_NT[:, :end]

        def parts(of: AttentionConfig) -> tuple[Tensor, Tensor, Tensor]:
            return reference_weights(q, k, of, params, position_NT[:, begin:], position_NT, valid_NT, scale, softcap)

        softmax_part, linear_part, extra = parts(spec)
        weight = softmax_part + linear_part
        hybrid = weight / (weight.sum(-1, keepdim=True) + extra).clamp_min(DENOMINATOR_FLOOR)

        everything = AttentionConfig("sliding", sliding_window or max(self.q.shape[2], 1), feature_map=None)
        softmax_part, _, extra = parts(everything)
        softmax = softmax_part / (softmax_part.sum(-1, keepdim=True) + extra).clamp_min(DENOMINATOR_FLOOR)
        return hybrid, softmax
