"""The losses of attention transfer: on the outputs of hybrid attention, and on its weights; and these weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
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
    cu_seqlens: Tensor | None = None,
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
    check_arguments(q_BHTD, k_BGTD, v_BGTD, config, params, cu_seqlens, None)
    if target_BHTD.shape != q_BHTD.shape:
        raise ValueError(f"target: expected q's shape {list(q_BHTD.shape)}, got {list(target_BHTD.shape)}")
    heads, head_dim, config = q_BHTD.shape[1], q_BHTD.shape[3], replace(config, cache_bits=None)
    count = q_BHTD.numel() if cu_seqlens is None else cu_seqlens[-1] * (heads * head_dim)

    inputs = (q_BHTD, k_BGTD, v_BGTD, target_BHTD)
    fits = target_BHTD.dtype == q_BHTD.dtype and not needs_gradient(*inputs)
    if fits and has_kernel(backend, q_BHTD, lambda: supports(*inputs[:3], config, params)):
        from lolcats.ops.hybrid_attention.kernels.op import triton_attention  # imports Triton

        with torch.autocast(q_BHTD.device.type, enabled=False):
            total = triton_attention(*inputs[:3], config, params, cu_seqlens=cu_seqlens, target_BHTD=target_BHTD)
        return total / count
    y_BHTD, _ = hybrid_attention(*inputs[:3], config, params, cu_seqlens=cu_seqlens, backend=backend)
    dtype = torch.promote_types(y_BHTD.dtype, torch.float32)
    square_BHTD = (y_BHTD.to(dtype) - target_BHTD.to(dtype)).square()
    if cu_seqlens is None:
        return square_BHTD.mean()
    real_T = torch.arange(q_BHTD.shape[2], device=cu_seqlens.device) < cu_seqlens[-1]
    return (square_BHTD.sum((0, 1, 3)) * real_T).sum() / count


def _weights(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    sliding_window: int | None,
    cu_seqlens: Tensor | None,
) -> tuple[Callable[[int, int], tuple[Tensor, Tensor]], Tensor, int]:
    """What gives hybrid and softmax weights of queries `begin` to `end` over the keys up to them,
    [N, H, end - begin, end] each in the accumulation type; the lengths [N] of the rows, and their width L."""
    length_N = torch.full((len(q_BHTD),), q_BHTD.shape[2], device=q_BHTD.device)
    if cu_seqlens is not None:
        q_BHTD, k_BGTD, length_N = _rows(q_BHTD, cu_seqlens), _rows(k_BGTD, cu_seqlens), cu_seqlens.diff()
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

    return weights, length_N, tokens


def _rows(x_1HTD: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N, H, L, D]: the sequences of a packed row, with padding after them."""
    found = [x_1HTD[0, :, begin:end].transpose(0, 1) for begin, end in pairwise(cu_seqlens.tolist())]
    return pad_sequence(found, batch_first=True).transpose(1, 2)


def attention_weights(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    sliding_window: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised weights of hybrid attention and of the softmax attention that it stands for: quadratic.

    With `cu_seqlens` the rows are the single sequences, left-aligned (N of them, L tokens long); otherwise N = B and
    L = T. Arguments as `hybrid_attention`; `sliding_window` limits the softmax only.

    Returns:
        hybrid [N, H, L, L], softmax [N, H, L, L] (rows sum to 1; less with `params.sink_logits`), and the
        lengths [N] of the rows.
    """
    weights, length_N, tokens = _weights(q_BHTD, k_BGTD, config, params, sliding_window, cu_seqlens)
    return *weights(0, tokens), length_N


def weights_cross_entropy(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    sliding_window: int | None = None,
    cu_seqlens: Tensor | None = None,
    block: int = 128,
) -> Tensor:
    """Mean over heads and real queries of -sum_j softmax_nj log hybrid_nj (arXiv:2402.04347); a scalar.

    The softmax weights are constants. Weights are computed for a block of queries at a time, and again in the backward
    pass, so that no matrix of weights outlives its block. Arguments and errors as `attention_weights`.
    """
    with torch.autocast(q_BHTD.device.type, enabled=False):
        weights, length_N, tokens = _weights(q_BHTD, k_BGTD, config, params, sliding_window, cu_seqlens)
        real_NL = torch.arange(tokens, device=length_N.device) < length_N[:, None]
        share_NL = real_NL.to(accumulation_dtype(q_BHTD.dtype)) / (real_NL.sum() * q_BHTD.shape[1])

        def part(begin: int) -> Tensor:
            end = min(begin + block, tokens)
            hybrid, softmax = weights(begin, end)
            # Entries without softmax weight drop out; the floor keeps the logarithm of the others finite.
            cross_NHT = -(softmax.detach() * hybrid.clamp_min(DENOMINATOR_FLOOR).log()).sum(-1)
            return (cross_NHT * share_NL[:, None, begin:end]).sum()

        loss = share_NL.new_zeros(())
        for begin in range(0, tokens, block):
            # A CUDA graph could not hold the generator's state, and nothing draws from it.
            loss = loss + checkpoint(part, begin, use_reentrant=False, preserve_rng_state=False)
        return loss
