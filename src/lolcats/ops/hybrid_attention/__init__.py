"""Hybrid attention: softmax over a window, linear attention before it, one shared denominator.

`hybrid_attention` is the only function that the rest of the package calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.arguments import check_arguments
from lolcats.ops.hybrid_attention.chunked import chunked
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.ops.hybrid_attention.kernels.support import supports, supports_step
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.ragged import Rows, by_length, rows_from_borders, rows_from_mask, rows_from_segments
from lolcats.ops.hybrid_attention.reference import reference
from lolcats.ops.hybrid_attention.remember import remembered
from lolcats.ops.hybrid_attention.retention import retention
from lolcats.ops.hybrid_attention.sparse_cache import sparse_cached
from lolcats.ops.hybrid_attention.sparse_chunked import sparse_chunked
from lolcats.ops.hybrid_attention.state import HybridState
from lolcats.ops.hybrid_attention.step import as_step, step

__all__ = ["HybridParams", "HybridState", "hybrid_attention", "initial_state"]

BACKENDS = ("auto", "reference", "chunked", "triton")
# Token by token.
retention_reference = partial(retention, chunk=1)
# On a GPU, what goes from block to block in one launch.
sparse_by_kernel = partial(sparse_chunked, use_kernel=True)
sparse_step, retention_step = as_step(sparse_cached), as_step(retention)
# These know rows that begin with a token and may end in padding; the GPU kernels know every layout.
ON_ROWS = (reference, chunked, sparse_cached, sparse_chunked, sparse_by_kernel, retention, retention_reference)


def hybrid_attention(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    state: HybridState | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_state: bool = False,
    inplace: bool = False,
    block_evicted: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, HybridState | None]:
    """Hybrid linear and window attention, equation hybrid_linear_swa of arXiv:2410.10254 (see `spec`).

    Args:
        q_BHTD: queries [B, H, T, D], after rotary embedding.
        k_BGTD, v_BGTD: keys and values [B, G, T, D]; H is a multiple of G.
        spec: window, sinks and feature map.
        params: gamma and the feature maps' weights.
        scale: factor of the scores of the softmax part; 1 / sqrt(D) by default.
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
        state: the state after the tokens before these; None: the sequences start here.
        mask: [B, T] bool, False for padding anywhere in a row. Padding tokens do not exist: they take no
            position, and their outputs are zero.
        segment_ids: [B, T] int, several independent documents in a row: each run of equal ids is a
            sequence of its own, negative ids are padding. Excludes `mask`, `state` and `return_state`.
        cu_seqlens: [N + 1] int, borders of N sequences that lie one behind the other in a batch of one row, from 0
            up to T (less: the rest is padding). `state` and the returned state then have N rows. Excludes `mask`
            and `segment_ids`.
        return_state: also return the state after these tokens.
        inplace: allow single-token calls without autograd to write into `state`'s tensors.
        block_evicted: False, if the caller knows that no block leaves the window (`AttentionConfig.block_evicted`) at
            the single token of any sequence. With a sparse cache a GPU else computes at every token what only the
            first of a block needs. Other calls ignore it.
        backend: "reference" (quadratic), "chunked" (linear time and memory, any device), "triton" (GPU
            kernels), or "auto" (triton on a GPU where the kernels take the call, else chunked).

    Returns:
        y [B, H, T, D] in q's type, and the state or None.

    Raises:
        ValueError: shapes that do not fit each other, with what was expected; with backend "triton", a call
            that the kernels do not take, with the reason.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")
    check_arguments(q_BHTD, k_BGTD, v_BGTD, spec, params, state, mask, segment_ids, return_state, cu_seqlens)
    if scale is None:
        scale = 1.0 / math.sqrt(q_BHTD.shape[-1])

    # Sums run in float32 here; autocast would turn the products into half precision.
    device = q_BHTD.device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        one_token = q_BHTD.shape[2] == 1 and not torch.is_grad_enabled()
        if state is not None and one_token and backend != "reference" and cu_seqlens is None:
            fold = {"block_evicted": block_evicted} if spec.sparse_cache else {}
            return _step_implementation(backend, q_BHTD, k_BGTD, v_BGTD, spec, params, state)(
                q_BHTD,
                k_BGTD,
                v_BGTD,
                spec,
                params,
                scale=scale,
                softcap=softcap,
                state=state,
                mask=mask,
                inplace=inplace,
                **fold,
            )

        attend = _implementation(backend, q_BHTD, k_BGTD, v_BGTD, spec, params, softcap, state)
        options: dict[str, Any] = {"scale": scale, "fresh": state is None, "need_state": return_state}
        if attend not in ON_ROWS:
            before = state
            if return_state and state is None:
                before = initial_state(spec, params, _per_sequence(k_BGTD, cu_seqlens))
            layout = {"mask": mask, "segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
            y, after = attend(q_BHTD, k_BGTD, v_BGTD, spec, params, state=before, **layout, **options)
            return y, (after if return_state else None)

        groups: list[Rows | None] = [None]
        if mask is not None:
            groups = [remembered(rows_from_mask, mask)]
        elif segment_ids is not None:
            groups = [*by_length(rows_from_segments(segment_ids))]
        elif cu_seqlens is not None:
            all_rows = rows_from_borders(cu_seqlens, q_BHTD.shape[2])
            groups = [all_rows] if state is not None or return_state else [*by_length(all_rows)]
        parts = []
        for rows in groups:  # more than one only where no state comes in or goes out
            q, k, v = (x if rows is None else rows.align(x) for x in (q_BHTD, k_BGTD, v_BGTD))
            before = initial_state(spec, params, k) if state is None else state
            length_B = None if rows is None else rows.length_N
            y, after = attend(q, k, v, spec, params, softcap=softcap, state=before, length_B=length_B, **options)
            parts.append(y if rows is None else rows.restore(y))
        return reduce(torch.add, parts), (after if return_state else None)


def _per_sequence(k_BGTD: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Keys with a row for each sequence; only their shape and type matter."""
    return k_BGTD if cu_seqlens is None else k_BGTD.expand(len(cu_seqlens) - 1, -1, -1, -1)


def _implementation(
    backend: str,
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    softcap: float | None,
    state: HybridState | None,
) -> Callable[..., tuple[Tensor, HybridState | None]]:
    if backend == "reference":
        return _variant(spec, reference, sparse_cached, retention_reference)
    if backend == "triton" or (backend == "auto" and q_BHTD.is_cuda):
        reason = supports(q_BHTD, k_BGTD, v_BGTD, spec, params, softcap=softcap, state=state)
        if reason is None:
            from lolcats.ops.hybrid_attention.kernels.op import triton_attention  # imports Triton

            return triton_attention
        if backend == "triton":
            raise ValueError(f"backend='triton' does not take this call. {reason} Use backend='auto'.")
        return _variant(spec, chunked, sparse_by_kernel, retention)
    return _variant(spec, chunked, sparse_chunked, retention)


def _step_implementation(
    backend: str,
    q_BH1D: Tensor,
    k_BG1D: Tensor,
    v_BG1D: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    state: HybridState,
) -> Callable[..., tuple[Tensor, HybridState]]:
    """The kernel for one token where it takes the call; `step` takes all."""
    if backend == "triton" or (backend == "auto" and q_BH1D.is_cuda):
        reason = supports_step(q_BH1D, k_BG1D, v_BG1D, spec, params, state=state)
        if reason is None:
            from lolcats.ops.hybrid_attention.kernels.decode import triton_step  # imports Triton

            return triton_step
        if backend == "triton":
            raise ValueError(f"backend='triton' does not take this call. {reason} Use backend='auto'.")
    return _variant(spec, step, sparse_step, retention_step)


def _variant(spec: AttentionConfig, plain: Callable, sparse: Callable, forgetting: Callable) -> Callable:
    """The one of three implementations that computes `spec`."""
    if spec.is_retention:
        return forgetting
    return sparse if spec.sparse_cache else plain


def initial_state(spec: AttentionConfig, params: HybridParams, k_BGTD: Tensor) -> HybridState:
    """The state before the first token of the sequences whose keys look like `k_BGTD`."""
    if spec.feature_map is None or params.k_weight is None:
        return HybridState.zeros(spec, k_BGTD.shape[0], k_BGTD.shape[1], k_BGTD.shape[1], 0, k_BGTD)
    features = params.k_weight.shape[2] * get_feature_map(spec.feature_map).multiple
    return HybridState.zeros(spec, k_BGTD.shape[0], k_BGTD.shape[1], params.k_weight.shape[0], features, k_BGTD)
