"""The losses of attention transfer: on the outputs of hybrid attention, and on its weights; and these weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.api import check_arguments, has_kernel, hybrid_attention, supports
from lolcats.ops.hybrid_attention.equation import (
    key_features,
    query_features,
    quotient,
    repeat_heads,
    scores,
    softmax_weights,
)
from lolcats.ops.hybrid_attention.state import DENOMINATOR_FLOOR, HybridParams, accumulation_dtype, needs_gradient


def output_mse(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    target_BHTD: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    backend: str = "auto",
) -> Tensor:
    """Mean over tokens, heads and head_dim of (hybrid attention - target)^2; a float32 scalar.

    On a GPU the kernels read the target where they have the outputs: neither outputs nor their gradient are
    written. That path has gradients of `params` only; it is not taken if q, k or v want theirs.

    Args:
        target_BHTD: [B, H, T, D], without gradient.
        Others as `hybrid_attention`.

    Raises:
        ValueError: as `hybrid_attention`, and a target of another shape than q.
    """
    check_arguments(q_BHTD, k_BGTD, v_BGTD, config, params, None, None)
    if target_BHTD.shape != q_BHTD.shape:
        raise ValueError(f"target: expected q's shape {list(q_BHTD.shape)}, got {list(target_BHTD.shape)}")
    config, inputs = replace(config, cache_bits=None), (q_BHTD, k_BGTD, v_BGTD, target_BHTD)
    fits = target_BHTD.dtype == q_BHTD.dtype and not needs_gradient(*inputs)
    if fits and has_kernel(backend, q_BHTD, lambda: supports(*inputs[:3], config, params)):
        from lolcats.ops.hybrid_attention.kernels.op import triton_attention  # imports Triton

        with torch.autocast(q_BHTD.device.type, enabled=False):
            return triton_attention(*inputs[:3], config, params, target_BHTD=target_BHTD) / q_BHTD.numel()
    y_BHTD, _ = hybrid_attention(*inputs[:3], config, params, backend=backend)
    dtype = torch.promote_types(y_BHTD.dtype, torch.float32)
    return (y_BHTD.to(dtype) - target_BHTD.to(dtype)).square().mean()


def attention_weights(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    sliding_window: int | None = None,
) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Normalised weights of hybrid attention and of the softmax attention that it stands for: quadratic.

    Args:
        Others as `hybrid_attention`.
        sliding_window: limits the softmax only.

    Returns:
        A function of `begin` and `end`: the hybrid and the softmax weights of these queries over the keys up to them,
        [B, H, end - begin, end] each in the accumulation type; rows sum to 1, or less with `params.sink_logits`.
    """
    dtype, (_, heads, tokens, _) = accumulation_dtype(q_BHTD.dtype), q_BHTD.shape
    q, k = q_BHTD.to(dtype), k_BGTD.to(dtype)
    phi_q = phi_k = None
    if config.feature_map is not None:
        phi_q, phi_k = query_features(q, config, params), repeat_heads(key_features(k, config, params), heads)
    k, limit = repeat_heads(k, heads), sliding_window or max(tokens, 1)
    gamma = params.gamma.to(dtype)[:, None, None]
    sink_logit = None if params.sink_logits is None else params.sink_logits.to(dtype)[:, None, None]

    def weights(begin: int, end: int) -> tuple[Tensor, Tensor]:
        query, key = torch.arange(begin, end, device=q.device)[:, None], torch.arange(end, device=q.device)
        score = scores(q[:, :, begin:end], k[:, :, :end], params)
        share, mass, total = softmax_weights(score, (key <= query) & (query - key < limit), sink_logit)
        softmax = share * (mass / total)

        in_softmax = (key <= query) & ((key >= config.window_start(query)) | (key < config.sinks))
        hybrid, total = score.new_zeros(()), score.new_zeros(())
        if config.has_softmax:
            share, mass, total = softmax_weights(score, in_softmax, sink_logit)
            factor = config.gamma_at(gamma, query)
            hybrid, total = factor * mass * share, factor * total
        if phi_q is not None and phi_k is not None:
            linear = (phi_q[:, :, begin:end] @ phi_k[:, :, :end].mT).masked_fill(in_softmax | (key > query), 0.0)
            hybrid, total = hybrid + linear, total + linear.sum(-1, keepdim=True)
        return quotient(hybrid, total), softmax

    return weights


def weights_cross_entropy(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    sliding_window: int | None = None,
    block: int = 128,
) -> Tensor:
    """Mean over heads and queries of -sum_j softmax_nj log hybrid_nj (arXiv:2402.04347); a scalar.

    The softmax weights are constants. Weights are computed for a block of queries at a time, and again in the backward
    pass, so that no matrix of weights outlives its block. Arguments and errors as `attention_weights`.
    """
    with torch.autocast(q_BHTD.device.type, enabled=False):
        weights = attention_weights(q_BHTD, k_BGTD, config, params, sliding_window)
        batch, heads, tokens, _ = q_BHTD.shape

        def part(begin: int) -> Tensor:
            hybrid, softmax = weights(begin, min(begin + block, tokens))
            # Entries without softmax weight drop out; the floor keeps the logarithm of the others finite.
            return -(softmax.detach() * hybrid.clamp_min(DENOMINATOR_FLOOR).log()).sum()

        loss = q_BHTD.new_zeros((), dtype=accumulation_dtype(q_BHTD.dtype))
        for begin in range(0, tokens, block):
            # A CUDA graph could not hold the generator's state, and nothing draws from it.
            loss = loss + checkpoint(part, begin, use_reentrant=False, preserve_rng_state=False)
        return loss / (batch * heads * tokens)
