"""Hybrid attention: softmax over a window, linear attention before it, one shared denominator.

`hybrid_attention` is the only function that the rest of the package calls.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lolcats.ops.hybrid_attention.chunked import chunked
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.ops.hybrid_attention.ragged import Rows
from lolcats.ops.hybrid_attention.ragged import rows_from_mask
from lolcats.ops.hybrid_attention.ragged import rows_from_segments
from lolcats.ops.hybrid_attention.reference import reference
from lolcats.ops.hybrid_attention.spec import HybridParams
from lolcats.ops.hybrid_attention.spec import HybridSpec
from lolcats.ops.hybrid_attention.state import HybridState
from lolcats.ops.hybrid_attention.step import step

__all__ = ["HybridParams", "HybridSpec", "HybridState", "hybrid_attention", "initial_state"]

BACKENDS = ("auto", "reference", "chunked")


def hybrid_attention(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    spec: HybridSpec,
    params: HybridParams,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    state: HybridState | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    return_state: bool = False,
    inplace: bool = False,
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
        return_state: also return the state after these tokens.
        inplace: allow single-token calls without autograd to write into `state`'s tensors.
        backend: "reference" (quadratic), "chunked" (linear time and memory), or "auto".

    Returns:
        y [B, H, T, D] in q's type, and the state or None.

    Raises:
        ValueError: shapes that do not fit each other, with what was expected.
    """
    _check(q_BHTD, k_BGTD, v_BGTD, spec, params, state, mask, segment_ids, return_state, backend)
    if scale is None:
        scale = 1.0 / math.sqrt(q_BHTD.shape[-1])

    if (
        backend != "reference"
        and state is not None
        and q_BHTD.shape[2] == 1
        and not torch.is_grad_enabled()
    ):
        return step(
            q_BHTD, k_BGTD, v_BGTD, spec, params, scale=scale, softcap=softcap, state=state, mask=mask, inplace=inplace
        )

    rows: Rows | None = None
    if segment_ids is not None:
        rows = rows_from_segments(segment_ids)
    elif mask is not None:
        rows = rows_from_mask(mask)
    if rows is not None:
        q_BHTD, k_BGTD, v_BGTD = rows.align(q_BHTD), rows.align(k_BGTD), rows.align(v_BGTD)

    implementation = reference if backend == "reference" else chunked
    y, after = implementation(
        q_BHTD,
        k_BGTD,
        v_BGTD,
        spec,
        params,
        scale=scale,
        softcap=softcap,
        state=initial_state(spec, params, k_BGTD) if state is None else state,
        fresh=state is None,
        length_B=None if rows is None else rows.length_N,
        need_state=return_state,
    )
    return (y if rows is None else rows.restore(y)), (after if return_state else None)


def initial_state(spec: HybridSpec, params: HybridParams, k_BGTD: Tensor) -> HybridState:
    """The state before the first token of the sequences whose keys look like `k_BGTD`."""
    if spec.feature_map is None or params.k_weight is None:
        return HybridState.zeros(spec, k_BGTD.shape[0], k_BGTD.shape[1], k_BGTD.shape[1], 0, k_BGTD)
    features = params.k_weight.shape[2] * get_feature_map(spec.feature_map).multiple
    return HybridState.zeros(spec, k_BGTD.shape[0], k_BGTD.shape[1], params.k_weight.shape[0], features, k_BGTD)


def _check(q, k, v, spec, params, state, mask, segment_ids, return_state, backend) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")
    if q.dim() != 4 or k.shape != v.shape or k.dim() != 4:
        raise ValueError(
            f"expected q [B, H, T, D] and k, v [B, G, T, D] of one shape; got q {list(q.shape)}, k {list(k.shape)},"
            f" v {list(v.shape)}"
        )
    batch, heads, tokens, dim = q.shape
    if (k.shape[0], k.shape[2], k.shape[3]) != (batch, tokens, dim):
        raise ValueError(f"q {list(q.shape)} and k {list(k.shape)} differ in batch, tokens or head_dim")
    kv_heads = k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key/value heads")
    if params.gamma.shape != (heads,):
        raise ValueError(f"gamma: expected [{heads}] (one per query head), got {list(params.gamma.shape)}")
    if spec.feature_map is not None:
        if params.q_weight is None or params.k_weight is None:
            raise ValueError(f"feature_map={spec.feature_map!r} needs q_weight and k_weight; got None")
        expected_q = (heads, dim, params.k_weight.shape[2])
        if tuple(params.q_weight.shape) != expected_q:
            raise ValueError(f"q_weight: expected {list(expected_q)}, got {list(params.q_weight.shape)}")
        if params.k_weight.shape[0] not in (kv_heads, heads) or params.k_weight.shape[1] != dim:
            raise ValueError(
                f"k_weight: expected [{kv_heads} or {heads}, {dim}, P], got {list(params.k_weight.shape)}"
            )
    if segment_ids is not None and (mask is not None or state is not None or return_state):
        raise ValueError("segment_ids cannot be combined with mask, state or return_state; use negative ids for padding")
    for name, tensor in (("mask", mask), ("segment_ids", segment_ids)):
        if tensor is not None and tuple(tensor.shape) != (batch, tokens):
            raise ValueError(f"{name}: expected [{batch}, {tokens}], got {list(tensor.shape)}")
    if state is not None and (state.position.shape[0] != batch or state.k.shape[2] != spec.capacity):
        raise ValueError(
            f"the state holds {state.position.shape[0]} sequences and {state.k.shape[2]} window slots; expected"
            f" {batch} and {spec.capacity}"
        )
