"""The calls that benchmarks of the attention function time: settings, random inputs, implementations."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lolcats.config.attention import AttentionConfig
from lolcats.ops import HybridParams, HybridState, hybrid_attention, output_mse
from lolcats.ops.hybrid_attention.feature_maps import FEATURE_MAPS

# forward: no autograd; state: forward, with the state after the last token; step: one token after the others, into
# the state in place; train: forward and backward with all gradients; stage1: squared error against given outputs,
# and its gradients of gamma and the feature maps' weights.
MODES = ("forward", "state", "step", "train", "stage1")
PEERS = ("sdpa_cudnn", "flash_window")
IMPLEMENTATIONS = ("triton", "chunked", "reference", *PEERS)
GPU_SHAPES = ((1, 1024), (1, 4096), (1, 16384), (1, 65536), (1, 131072), (16, 4096), (8, 4096), (64, 1024))
CPU_SHAPES = ((1, 128), (1, 512))


@dataclass(frozen=True)
class AttentionBench:
    """What to measure. The defaults are one layer of the Llama-3-8B shape."""

    shapes: tuple[tuple[int, int], ...] = GPU_SHAPES if torch.cuda.is_available() else CPU_SHAPES  # (batch, tokens)
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    modes: tuple[str, ...] = MODES
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    attention: AttentionConfig = field(default_factory=lambda: AttentionConfig(feature_dim=64))
    dtype: str = "bfloat16"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    budget_s: float = 1.0  # per number
    max_quadratic_tokens: int = 2048  # longest sequence for `reference`

    @property
    def state_heads(self) -> int:
        return self.kv_heads if self.attention.share_state == "kv_head" else self.heads

    @property
    def columns(self) -> int:
        """Of a feature map's weight."""
        return self.attention.feature_dim or self.head_dim // 2


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    dy: Tensor
    params: HybridParams

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.k.nbytes + self.v.nbytes + self.dy.nbytes


def make_inputs(bench: AttentionBench, batch: int, tokens: int, mode: str, device: torch.device) -> Inputs:
    """Random activations as projections leave them: [B, T, H, D] in memory, seen as [B, H, T, D]."""
    dtype = getattr(torch, bench.dtype)
    D, P = bench.head_dim, bench.columns

    def activation(heads: int) -> Tensor:
        return torch.randn(batch, tokens, heads, D, device=device).to(dtype).transpose(1, 2)

    state_heads = bench.state_heads
    params = HybridParams(torch.zeros(bench.heads, device=device))
    if bench.attention.feature_map is not None:
        params = params._replace(
            q_weight=torch.randn(bench.heads, D, P, device=device) / math.sqrt(D),
            k_weight=torch.randn(state_heads, D, P, device=device) / math.sqrt(D),
        )
        if FEATURE_MAPS[bench.attention.feature_map].has_bias:
            params = params._replace(
                q_bias=torch.zeros(bench.heads, P, device=device), k_bias=torch.zeros(state_heads, P, device=device)
            )
    q, dy = activation(bench.heads), activation(bench.heads)
    return trained(Inputs(q, activation(bench.kv_heads), activation(bench.kv_heads), dy, params), mode)


def trained(x: Inputs, mode: str) -> Inputs:
    """The same, with gradients wanted for what the mode trains."""
    learned = [tensor for tensor in x.params.tensors if tensor is not None]
    for tensor in {"stage1": learned, "train": [x.q, x.k, x.v, *learned]}.get(mode, []):
        tensor.requires_grad_()
    return x


def make_call(bench: AttentionBench, name: str, mode: str, x: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """One call of an implementation; returns all that the mode computes.

    Raises:
        NotImplementedError: an implementation that does not have the mode.
    """
    if name in PEERS and mode not in ("forward", "train"):
        raise NotImplementedError(f"has no {mode}")
    if mode == "stage1":
        learned = [tensor for tensor in x.params.tensors if tensor is not None]

        def transfer() -> tuple[Tensor, ...]:
            loss = output_mse(x.q, x.k, x.v, x.dy, bench.attention, x.params, backend=name)
            return torch.autograd.grad(loss, learned)

        return transfer
    if mode in ("state", "step"):
        return torch.no_grad()(_stateful(bench, name, mode, x))
    forward, leaves = _forward(bench, name, x)
    if mode == "forward":
        return torch.no_grad()(lambda: (forward(),))
    return lambda: torch.autograd.grad(forward(), leaves, x.dy)


@torch.no_grad()
def _stateful(bench: AttentionBench, name: str, mode: str, x: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """A forward pass with its state, or a decoding step: the last token once more, after all of them."""
    q_BH1D, k_BG1D, v_BG1D = (tensor[:, :, -1:].contiguous() for tensor in (x.q, x.k, x.v))

    def read() -> tuple[Tensor, HybridState]:
        y, after = hybrid_attention(x.q, x.k, x.v, bench.attention, x.params, return_state=True, backend=name)
        assert after is not None
        return y, after

    if mode == "state":
        return lambda: ((found := read())[0], *found[1]._asdict().values())
    if name == "reference":  # which keeps no state: whole sequences with one token more each time
        whole = [torch.cat(pair, 2) for pair in ((x.q, q_BH1D), (x.k, k_BG1D), (x.v, v_BG1D))]

        def again() -> tuple[Tensor]:
            whole[:] = [torch.cat((tensor, tensor[:, :, -1:]), 2) for tensor in whole]
            return (hybrid_attention(*whole, bench.attention, x.params, backend=name)[0][:, :, -1:],)

        return again
    inputs = (q_BH1D, k_BG1D, v_BG1D, bench.attention, x.params)
    options: dict[str, Any] = {"return_state": True, "backend": name}
    state = hybrid_attention(*inputs, state=read()[1], **options)[1]  # in the form that steps keep

    def step() -> tuple[Tensor]:
        nonlocal state
        y, state = hybrid_attention(*inputs, state=state, **options)
        return (y,)

    return step


def _softmax(q_BHTD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor) -> Tensor:
    """PyTorch's causal attention, on a GPU with cuDNN's kernels."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q_BHTD.is_cuda else nullcontext():
        grouped = q_BHTD.shape[1] != k_BGKD.shape[1]
        return scaled_dot_product_attention(q_BHTD, k_BGKD, v_BGKD, is_causal=True, enable_gqa=grouped)


def _windowed(config: AttentionConfig, x: Inputs) -> Tensor:
    """FlashAttention of a sliding window as wide as ours is on average: the floor of the window's part."""
    keys = config.window_size
    if config.window == "terraced":
        keys = keys * (2 * config.window_blocks - 1) // 2
    q, k, v = (tensor.transpose(1, 2) for tensor in (x.q, x.k, x.v))
    settings = (None, None, q.shape[1], q.shape[1], 0.0, True, False)
    windows = {"window_size_left": keys - 1, "window_size_right": 0}
    return torch.ops.aten._flash_attention_forward(q, k, v, *settings, **windows)[0].transpose(1, 2)


def _forward(bench: AttentionBench, name: str, x: Inputs) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """A forward pass, and what gradients are taken of."""
    leaves = [tensor for tensor in (x.q, x.k, x.v, *x.params.tensors) if tensor is not None and tensor.requires_grad]
    if name not in PEERS:
        return lambda: hybrid_attention(x.q, x.k, x.v, bench.attention, x.params, backend=name)[0], leaves
    qkv = [tensor for tensor in (x.q, x.k, x.v) if tensor.requires_grad]
    if name == "sdpa_cudnn":
        return lambda: _softmax(x.q, x.k, x.v), qkv
    return lambda: _windowed(bench.attention, x), qkv
