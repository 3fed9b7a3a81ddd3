"""What the operator expects of its arguments, checked before any implementation runs."""

from __future__ import annotations

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.eight_bits import FACTOR_BYTES, is_packed
from lolcats.ops.hybrid_attention.feature_maps import FEATURE_MAPS
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.state import HybridState


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    cu_seqlens: Tensor | None,
    state: HybridState | None,
) -> None:
    """Raise ValueError, with what was expected and what came, if the arguments do not fit each other."""
    if q.dim() != 4 or k.shape != v.shape or k.dim() != 4:
        raise ValueError(
            f"expected q [B, H, T, D] and k, v [B, G, T, D] of one shape; got q {list(q.shape)}, k {list(k.shape)},"
            f" v {list(v.shape)}"
        )
    batch, heads, tokens, dim = q.shape
    if (k.shape[0], k.shape[2], k.shape[3]) != (batch, tokens, dim):
        raise ValueError(f"q {list(q.shape)} and k {list(k.shape)} differ in batch, tokens or head_dim")
    kv_heads = k.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key/value heads")
    _check_params(config, params, heads, kv_heads, dim)
    if cu_seqlens is not None:
        _check_borders(cu_seqlens, batch, tokens)
        batch = len(cu_seqlens) - 1
    if state is not None:
        _check_state(config, params, state, batch, kv_heads, dim)


def _check_borders(cu_seqlens: Tensor, batch: int, tokens: int) -> None:
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens: expected [sequences + 1], int32 or int64, got {list(cu_seqlens.shape)}, {cu_seqlens.dtype}"
        )
    if batch != 1:
        raise ValueError(
            f"cu_seqlens: expected a batch of one row, which holds all sequences, got {batch} rows; pack them into one"
        )
    if cu_seqlens.is_cpu and not torch.compiler.is_compiling():  # elsewhere it would take time to look
        borders = cu_seqlens.tolist()
        if borders[0] != 0 or borders[-1] > tokens or sorted(borders) != borders:
            raise ValueError(f"cu_seqlens: expected 0, then growing, up to {tokens} tokens at most; got {borders}")


def _check_params(config: AttentionConfig, params: HybridParams, heads: int, kv_heads: int, dim: int) -> None:
    _expect("window_factor", params.window_factor, (heads,), " (one per query head)")
    _expect("sink_logits", params.sink_logits, (heads,))
    if config.feature_map is None:
        return
    if params.q_weight is None or params.k_weight is None:
        raise ValueError(f"feature_map={config.feature_map!r} needs q_weight and k_weight; got None")
    state_heads, _, columns = params.k_weight.shape
    if state_heads not in (kv_heads, heads) or params.k_weight.shape[1] != dim:
        raise ValueError(f"k_weight: expected [{kv_heads} or {heads}, {dim}, P], got {list(params.k_weight.shape)}")
    _expect("q_weight", params.q_weight, (heads, dim, columns))
    _expect("q_bias", params.q_bias, (heads, columns))
    _expect("k_bias", params.k_bias, (state_heads, columns))


def _check_state(
    config: AttentionConfig, params: HybridParams, state: HybridState, batch: int, kv_heads: int, dim: int
) -> None:
    width = dim + FACTOR_BYTES if is_packed(state.k) else dim
    if state.position.shape[0] != batch or state.k.shape[2] != config.capacity:
        raise ValueError(
            f"the state holds {state.position.shape[0]} sequences and {state.k.shape[2]} window slots; expected"
            f" {batch} and {config.capacity}"
        )
    _expect("state.k", state.k, (batch, kv_heads, config.capacity, width))
    _expect("state.sink_k", state.sink_k, (batch, kv_heads, config.sinks, width))
    if config.feature_map is not None and params.k_weight is not None:
        features = params.k_weight.shape[2] * FEATURE_MAPS[config.feature_map].multiple
        _expect("state.S", state.S, (batch, params.k_weight.shape[0], features, dim))


def _expect(name: str, tensor: Tensor | None, shape: tuple[int, ...], note: str = "") -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected {list(shape)}{note}, got {list(tensor.shape)}")
