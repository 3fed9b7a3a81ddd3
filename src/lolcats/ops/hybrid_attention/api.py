"""The operator: checks its arguments and picks an implementation."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.eight_bits import FACTOR_BYTES, is_packed, pack
from lolcats.ops.hybrid_attention.chunked import chunked
from lolcats.ops.hybrid_attention.feature_maps import FEATURE_MAPS
from lolcats.ops.hybrid_attention.kernels import missing
from lolcats.ops.hybrid_attention.reference import reference
from lolcats.ops.hybrid_attention.state import (
    HybridParams,
    HybridState,
    initial_state,
    keeps_eight_bits,
    needs_gradient,
)
from lolcats.ops.hybrid_attention.step import step

BACKENDS = ("auto", "reference", "chunked", "triton")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_SINKS = 64
MAX_WINDOW = 1024
MAX_HEAD_DIM = 256
MAX_HEAD_DIM_FLOAT32 = 128
MAX_COLUMNS = 128
MAX_GROUP = 64


def hybrid_attention(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    cu_seqlens: Tensor | None = None,
    state: HybridState | None = None,
    return_state: bool = False,
    backend: str = "auto",
    shared: dict[Hashable, Any] | None = None,
) -> tuple[Tensor, HybridState | None]:
    """Hybrid linear and window attention: equation hybrid_linear_swa of arXiv:2410.10254, see `AttentionConfig`.

    Args:
        q_BHTD: queries [B, H, T, D], after rotary embedding.
        k_BGTD: keys [B, G, T, D]; H is a multiple of G.
        v_BGTD: values [B, G, T, D].
        config: the attention settings.
        params: the window's factor, the feature maps' weights, and scale, cap and sinks of the scores.
        cu_seqlens: [N + 1] int, borders of N sequences packed one after the other into a batch of one row, from 0
            up to T (if less, the rest is padding, whose outputs are zero). `state` and the returned state then have N
            rows. None: every row is a sequence.
        state: the state after the tokens before these; None: the sequences start here. With one token per row and
            without autograd it is updated in place, where its tensors allow it. Rows whose position is negative are
            then skipped: their states stay as they are, and their outputs are zero.
        return_state: also return the state after these tokens; that which kernels compute has no gradients.
        backend: "reference" (quadratic, whole sequences alone), "chunked" (linear time and memory, any device),
            "triton" (GPU kernels), or "auto" (triton on a GPU where the kernels take the call, else chunked).
        shared: what follows from borders and positions, kept for the other layers of a forward pass, which
            have the same ones; at first empty.

    With 8 `cache_bits`, keys and values that need no gradient are rounded as the window keeps them
    (`lolcats.ops.eight_bits`). A state decides for itself.

    Returns:
        y [B, H, T, D] in q's type, and the state or None.

    Raises:
        ValueError: shapes that do not fit each other, with what was expected; with backend "triton", a call
            that the kernels do not take, and why.
    """
    inputs = (q_BHTD, k_BGTD, v_BGTD, config, params)
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")
    check_arguments(*inputs, cu_seqlens, state)
    if backend == "reference" and state is not None:
        raise ValueError("backend='reference' takes whole sequences, from their first tokens; got a state")
    is_step = state is not None and q_BHTD.shape[2] == 1 and cu_seqlens is None and not torch.is_grad_enabled()
    kernels = has_kernel(backend, q_BHTD, lambda: supports(*inputs, state=state, step=is_step))
    if is_step and state is not None:  # tensors of autograd, or of inference mode outside of it, may not change
        in_mode = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()  # a compiler sees no such tensors
        if state.S.requires_grad or not (in_mode or not state.S.is_inference()):
            state = state.clone()
    keeps_packed = keeps_eight_bits(config, state, q_BHTD, k_BGTD, v_BGTD)
    if keeps_packed and not kernels:  # which round by themselves
        inputs = (q_BHTD, pack(k_BGTD), pack(v_BGTD), config, params)

    # Sums run in float32 here; autocast would turn the products into half precision.
    device = q_BHTD.device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        if is_step and state is not None:
            if not kernels:
                return step(*inputs, state=state)
            from lolcats.ops.hybrid_attention.kernels.decode import triton_step  # imports Triton

            return triton_step(*inputs, state=state)

        if kernels:
            from lolcats.ops.hybrid_attention.kernels.op import triton_attention, triton_with_state  # imports Triton

            after, tables = None, {"cu_seqlens": cu_seqlens, "shared": shared}
            if state is not None or return_state:
                y, after = triton_with_state(*inputs, state=state, **tables)
            if after is None or needs_gradient(*inputs[:3], *params.tensors):
                y = triton_attention(*inputs, **tables)
            return y, (after if return_state else None)
        attend: Callable[..., tuple[Tensor, HybridState]]
        attend, before = partial(chunked, fresh=state is None, need_state=return_state), state
        if before is None:
            before = initial_state(config, params, k_BGTD, cu_seqlens, packed=keeps_packed)
        if backend == "reference":
            attend = reference
        if cu_seqlens is None:
            y, after = attend(*inputs, state=before)
            return y, (after if return_state else None)
        # They take whole rows: of a packed one each sequence alone.
        outputs, states = [], []
        for n, (begin, end) in enumerate(pairwise(borders := cu_seqlens.tolist())):
            q, k, v = (x[:, :, begin:end] for x in inputs[:3])
            y, after = attend(q, k, v, config, params, state=HybridState(*(x[n : n + 1] for x in before)))
            outputs.append(y)
            states.append(after)
        outputs.append(torch.zeros_like(q_BHTD[:, :, borders[-1] :]))
        after = HybridState(*map(torch.cat, zip(*states, strict=True)))
        return torch.cat(outputs, dim=2), (after if return_state else None)


def has_kernel(backend: str, q_BHTD: Tensor, why_not: Callable[[], str | None]) -> bool:
    """Whether the backend asks for a kernel, and the kernel takes the call.

    Args:
        why_not: why the kernel does not take the call; None: it does.

    Raises:
        ValueError: backend "triton", and the kernel does not.
    """
    if backend != "triton" and not (backend == "auto" and q_BHTD.is_cuda):
        return False
    reason = why_not()
    if reason is not None and backend == "triton":
        raise ValueError(f"backend='triton' does not take this call. {reason} Use backend='auto'.")
    return reason is None


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


def supports(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    state: HybridState | None = None,
    step: bool = False,
) -> str | None:
    """Why the Triton kernels do not take this call, in one sentence; None if they do.

    `step`: it is one token with a state, by default as `initial_state` makes it.
    """
    if state is not None and is_packed(state.k) and q_BHTD.shape[3] % FACTOR_BYTES:
        return f"head_dim is {q_BHTD.shape[3]}; in 8 bits the kernels take multiples of {FACTOR_BYTES}."
    reason = _any_tensors(q_BHTD, k_BGTD, v_BGTD)
    if reason is not None:
        return reason
    if state is not None and needs_gradient(q_BHTD, k_BGTD, v_BGTD, *params.tensors, state.S):
        return "Gradients through a state are needed, which the kernels do not have."
    if params.k_weight is not None and not 8 <= params.k_weight.shape[2] <= MAX_COLUMNS:
        return f"feature_dim is {params.k_weight.shape[2]}; the kernels take 8 to {MAX_COLUMNS}."
    if config.sinks > MAX_SINKS:
        return f"There are {config.sinks} sinks; the kernels take up to {MAX_SINKS}."
    if config.window_size > MAX_WINDOW:
        return f"The window size is {config.window_size}; the kernels take up to {MAX_WINDOW}."
    if state is not None and state.S.dtype != torch.float32:
        return f"The state is {str(state.S.dtype).removeprefix('torch.')}; the kernels take float32 states."
    return _any_group(q_BHTD, k_BGTD) if step else None


def supports_softmax_step(q_BH1D: Tensor, k_BGKD: Tensor, v_BGKD: Tensor) -> str | None:
    """As `supports`, for one token of softmax attention over keys and values in memory."""
    if k_BGKD.shape[3] != v_BGKD.shape[3]:
        return f"Keys have {k_BGKD.shape[3]} and values {v_BGKD.shape[3]} dimensions; the kernel takes one size."
    stored = k_BGKD, v_BGKD
    if is_packed(k_BGKD):
        row = q_BH1D.shape[3] + FACTOR_BYTES
        strides = {x.stride(i) % FACTOR_BYTES for x in stored for i in range(3)}
        if strides != {0} or any((x.shape[3], x.stride(2)) != (row, row) for x in stored):
            return f"Keys and values in 8 bits are not in adjacent rows of {row} bytes, or their factors not aligned."
        stored = q_BH1D, q_BH1D
    return _any_tensors(q_BH1D, *stored) or _any_group(q_BH1D, k_BGKD)


def supports_store_tokens(k_BG1D: Tensor, v_BG1D: Tensor, keys_SGCE: Tensor, values_SGCE: Tensor) -> str | None:
    """As `supports`, for writing one token a row into keys and values in memory."""
    if k_BG1D.shape != v_BG1D.shape or keys_SGCE.stride() != values_SGCE.stride() or k_BG1D.dtype == torch.float64:
        return "Keys and values differ in shape or layout, or are float64."
    if {x.stride(-1) for x in (k_BG1D, v_BG1D, keys_SGCE)} != {1}:
        return "A token's entries in a head are not adjacent."
    if is_packed(keys_SGCE) and keys_SGCE.shape[-1] % FACTOR_BYTES:
        return "The factors of keys and values in 8 bits are not aligned."
    return _any_device(k_BG1D)


def _any_tensors(q_BHTD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor) -> str | None:
    """What is asked of queries, keys and values."""
    reason = _any_device(q_BHTD)
    if reason is not None:
        return reason
    if q_BHTD.dtype not in DTYPES or not q_BHTD.dtype == k_BGKD.dtype == v_BGKD.dtype:
        names = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q_BHTD, k_BGKD, v_BGKD))
        return f"q, k, v are {names}; the kernels take bfloat16, float16 or float32, one for all three."
    if q_BHTD.shape[2] == 0 or q_BHTD.shape[0] == 0:
        return "There are no tokens."
    if not 16 <= q_BHTD.shape[3] <= MAX_HEAD_DIM:
        return f"head_dim is {q_BHTD.shape[3]}; the kernels take 16 to {MAX_HEAD_DIM}."
    if q_BHTD.dtype == torch.float32 and q_BHTD.shape[3] > MAX_HEAD_DIM_FLOAT32:
        return f"head_dim is {q_BHTD.shape[3]}; in float32 the kernels take up to {MAX_HEAD_DIM_FLOAT32}."
    return None


def _any_group(q_BH1D: Tensor, k_BGKD: Tensor) -> str | None:
    """What is asked of the heads where a program takes a whole group."""
    heads, kv_heads = q_BH1D.shape[1], k_BGKD.shape[1]
    if heads // kv_heads > MAX_GROUP:
        return f"{heads} query heads share {kv_heads} key heads; the step takes up to {MAX_GROUP} each."
    return None


def _any_device(x: Tensor) -> str | None:
    if reason := missing():
        return reason
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"The tensors are on {x.device.type}; Triton kernels need a GPU."
    if x.is_cuda and torch.version.hip is None and torch.cuda.get_device_properties(x.device).major < 8:
        return "The GPU is older than Ampere (compute capability 8.0)."
    return None
