"""Softmax attention within a window and to the first tokens, by FlashAttention's own window: without masks.

Masks send PyTorch to its memory-efficient kernel, which computes what the mask hides, too. For inference alone: the
logarithms of the sums, by which both parts are joined, have no gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def takes_window(q_BHTD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor) -> bool:
    """Whether `window_attention` runs: on an NVIDIA GPU from Ampere on, in half precision, without gradients."""
    tensors = q_BHTD, k_BGKD, v_BGKD
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    if not q_BHTD.is_cuda or torch.version.cuda is None or torch.cuda.get_device_capability(q_BHTD.device) < (8, 0):
        return False
    head_dim = q_BHTD.shape[-1]
    half = all(x.dtype == q_BHTD.dtype and x.dtype in (torch.bfloat16, torch.float16) for x in tensors)
    return half and head_dim == v_BGKD.shape[-1] and head_dim % 8 == 0 and head_dim <= 256


def window_attention(
    q_BHTD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, window: int, sinks: int, *, scale: float | None, gap: bool
) -> Tensor:
    """[B, H, T, D] of queries that end with the keys: each sees its own and the `window - 1` keys before it, and sinks.

    Args:
        k_BGKD: K >= T keys in the order of their tokens.
        sinks: the first keys, which every query sees.
        gap: keys are missing between sinks and the others, which reach back from the first query by at least
            `window - 1`.
    """
    begin = sinks if gap else 0
    y_BHTD, log_sum_BHT = _within(q_BHTD, k_BGKD[:, :, begin:], v_BGKD[:, :, begin:], window, scale)
    if sinks == 0:
        return y_BHTD
    tokens, keys, groups = q_BHTD.shape[2], k_BGKD.shape[2], q_BHTD.shape[1] // k_BGKD.shape[1]
    k_BHSD, v_BHSD = (x[:, :, :sinks].repeat_interleave(groups, 1) for x in (k_BGKD, v_BGKD))
    score_BHTS = (q_BHTD @ k_BHSD.mT).to(log_sum_BHT.dtype) * (
        1 / math.sqrt(q_BHTD.shape[-1]) if scale is None else scale
    )
    if not gap:  # the window has them first
        place = torch.arange(keys, device=q_BHTD.device)
        score_BHTS = score_BHTS.masked_fill(place[:sinks] > place[keys - tokens :, None] - window, -math.inf)
    total_BHT1 = torch.logaddexp(log_sum_BHT, score_BHTS.logsumexp(-1))[..., None]
    y_sinks_BHTD = (score_BHTS - total_BHT1).exp() @ v_BHSD.to(log_sum_BHT.dtype)
    return ((log_sum_BHT[..., None] - total_BHT1).exp() * y_BHTD + y_sinks_BHTD).to(q_BHTD.dtype)


def _within(q_BHTD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, window: int, scale: float | None) -> tuple[Tensor, Tensor]:
    """Causal attention within a window [B, H, T, D], and the logarithm of its denominators [B, H, T], float32."""
    q_BTHD, k_BKGD, v_BKGD = (x.transpose(1, 2) for x in (q_BHTD, k_BGKD, v_BGKD))
    sizes = q_BHTD.shape[2], k_BGKD.shape[2]
    reach = {"window_size_left": window - 1, "window_size_right": 0}
    attend = torch.ops.aten._flash_attention_forward
    y_BTHD, log_sum_BHT, *_ = attend(q_BTHD, k_BKGD, v_BKGD, None, None, *sizes, 0.0, True, False, scale=scale, **reach)
    return y_BTHD.transpose(1, 2), log_sum_BHT
