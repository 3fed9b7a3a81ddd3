"""The hybrid attention as Triton kernels, and which calls they take: this file alone may be imported without Triton.

    op            the calls of forward and backward: with a gradient, or many tokens with states
    forward       states before every chunk, then outputs
    backward      the gradients of both
    decode        one token with a state
    softmax_step  one token of softmax attention, for exact heads; keys of one token over several programs
    store_tokens  new keys and values into a cache, or behind its own, in 8 bits if it keeps these
    operands      what a call gives to its kernels, and where packed sequences lie
    tiles         what all kernels share: loads, products, feature maps, windows

Shape suffixes in kernels: M rows of a query tile, N keys of a key tile, S sinks, P columns of a projection padded to
a power of two, D head_dim padded to a power of two. Sizes are fields of an `operands.KernelShape`.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.eight_bits import FACTOR_BYTES, is_packed
from lolcats.ops.hybrid_attention.state import HybridParams, HybridState, needs_gradient

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_SINKS = 64
MAX_WINDOW = 1024
MAX_HEAD_DIM = 256
MAX_HEAD_DIM_FLOAT32 = 128
MAX_COLUMNS = 128
MAX_GROUP = 64
HAS_TRITON = importlib.util.find_spec("triton") is not None


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
    if not HAS_TRITON:
        return "Triton is not installed."
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"The tensors are on {x.device.type}; Triton kernels need a GPU."
    if x.is_cuda and torch.version.hip is None and torch.cuda.get_device_properties(x.device).major < 8:
        return "The GPU is older than Ampere (compute capability 8.0)."
    return None
