"""Mean squared error of hybrid attention against given outputs: the loss of attention transfer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention import hybrid_attention
from lolcats.ops.hybrid_attention.arguments import check_arguments
from lolcats.ops.hybrid_attention.kernels.support import supports
from lolcats.ops.hybrid_attention.params import HybridParams


def output_mse(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    target_BHTD: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Mean over real tokens, heads and head_dim of (hybrid attention - target)^2; a float32 scalar.

    On a GPU the kernels read the target where they have the outputs: neither outputs nor their gradient are
    written. That path has gradients of `params` only; it is not taken if q, k or v want theirs.

    Args:
        target_BHTD: [B, H, T, D], without gradient.
        Others as `hybrid_attention`.

    Raises:
        ValueError: as `hybrid_attention`, and a target of another shape than q.
    """
    check_arguments(q_BHTD, k_BGTD, v_BGTD, spec, params, None, mask, segment_ids, False)
    if target_BHTD.shape != q_BHTD.shape:
        raise ValueError(f"target: expected q's shape {list(q_BHTD.shape)}, got {list(target_BHTD.shape)}")
    heads, head_dim = q_BHTD.shape[1], q_BHTD.shape[3]
    real_BT = real_tokens(mask, segment_ids)
    if not _has_kernel(q_BHTD, k_BGTD, v_BGTD, target_BHTD, spec, params, softcap, backend):
        y_BHTD, _ = hybrid_attention(
            q_BHTD,
            k_BGTD,
            v_BGTD,
            spec,
            params,
            scale=scale,
            softcap=softcap,
            mask=mask,
            segment_ids=segment_ids,
            backend=backend,
        )
        dtype = torch.promote_types(y_BHTD.dtype, torch.float32)
        square_BHTD = (y_BHTD.to(dtype) - target_BHTD.to(dtype)).square()
        if real_BT is None:
            return square_BHTD.mean()
        total = (square_BHTD.sum((1, 3)) * real_BT).sum()
        return total / (real_BT.sum() * (heads * head_dim))

    from lolcats.ops.hybrid_attention.kernels.op import triton_squared_error  # imports Triton

    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    with torch.autocast(q_BHTD.device.type, enabled=False):
        layout = {"mask": mask, "segment_ids": segment_ids}
        total = triton_squared_error(q_BHTD, k_BGTD, v_BGTD, target_BHTD, spec, params, scale=scale, **layout)
    return total / (q_BHTD.numel() if real_BT is None else real_BT.sum() * (heads * head_dim))


def real_tokens(mask: Tensor | None, segment_ids: Tensor | None) -> Tensor | None:
    """[B, T] bool: tokens that are no padding; None: all are none."""
    if segment_ids is not None:
        return segment_ids >= 0
    return None if mask is None else mask.bool()


def _has_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    target: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    softcap: float | None,
    backend: str,
) -> bool:
    if backend != "triton" and not (backend == "auto" and q.is_cuda):
        return False
    wants_more = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, target))
    return not wants_more and target.dtype == q.dtype and supports(q, k, v, spec, params, softcap=softcap) is None
