"""The calls that benchmarks of the attention function time: settings, random inputs, implementations."""

from __future__ import annotations

import importlib.util
import inspect
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
# fla, gated_delta: chunk_linear_attn and chunk_gated_delta_rule of flash-linear-attention, where it is installed;
# packed, varlen_attn: the operator and FlashAttention-2 in PyTorch on sequences of lognormal lengths in one row.
PEERS = ("sdpa_flash", "sdpa_cudnn", "flash_window", "fla", "gated_delta", "packed", "varlen_attn")
IMPLEMENTATIONS = ("triton", "chunked", "reference", *PEERS)
GPU_SHAPES = ((1, 1024), (1, 4096), (1, 16384), (1, 65536), (1, 131072), (16, 4096), (8, 4096), (64, 1024))
CPU_SHAPES = ((1, 128), (1, 512))


@dataclass(frozen=True)
class AttentionBench:
    """What to measure. The defaults are one layer of the Llama-3-8B shape."""

    shapes: tuple[tuple[int, int], ...] = GPU_SHAPES if torch.cuda.is_available() else CPU_SHAPES  # (batch, tokens)
    implementations: tuple[str, ...] = IMPLEMENTATIONS[:-2]
    modes: tuple[str, ...] = MODES
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    attention: AttentionConfig = field(default_factory=lambda: AttentionConfig(feature_dim=64))
    dtype: str = "bfloat16"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    budget_s: float = 1.0  # per number
    max_quadratic_tokens: int = 2048  # longest sequence for `reference`
    packed_sequences: int = 32  # in the row of packed and varlen_attn

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
        NotImplementedError, ModuleNotFoundError: an implementation that does not have the mode, or is missing.
    """
    if mode == "stage1":
        learned = [tensor for tensor in x.params.tensors if tensor is not None]

        def transfer() -> tuple[Tensor, ...]:
            loss = output_mse(x.q, x.k, x.v, x.dy, bench.attention, x.params, backend=name)
            return torch.autograd.grad(loss, learned)

        return _missing("has no feature maps to train") if name in PEERS else transfer
    if mode in ("state", "step"):
        return torch.no_grad()(_stateful(bench, name, mode, x))
    forward, leaves = _forward(bench, name, x)
    if mode == "forward":
        return torch.no_grad()(lambda: (forward(),))
    return lambda: torch.autograd.grad(forward(), leaves, x.dy)


def _missing(why: str) -> Any:
    raise NotImplementedError(why)


@torch.no_grad()
def _stateful(bench: AttentionBench, name: str, mode: str, x: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """A forward pass with its state, or a decoding step: the last token once more, after all of them."""
    q_BH1D, k_BG1D, v_BG1D = (tensor[:, :, -1:].contiguous() for tensor in (x.q, x.k, x.v))
    if name.startswith("sdpa") and mode == "step":
        return lambda: (_softmax(name, q_BH1D, x.k, x.v, is_causal=False),)
    if name in PEERS:
        return _missing("keeps no state here")

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


def _softmax(name: str, q_BHTD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, is_causal: bool = True) -> Tensor:
    """PyTorch's attention, on a GPU with the kernels of that name."""
    kind = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}[name]
    with sdpa_kernel(kind) if q_BHTD.is_cuda else nullcontext():
        grouped = q_BHTD.shape[1] != k_BGKD.shape[1]
        return scaled_dot_product_attention(q_BHTD, k_BGKD, v_BGKD, is_causal=is_causal, enable_gqa=grouped)


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
    if name in ("packed", "varlen_attn"):
        return _packed(bench, name, x, leaves)
    qkv = [tensor for tensor in (x.q, x.k, x.v) if tensor.requires_grad]
    if name.startswith("sdpa"):
        return lambda: _softmax(name, x.q, x.k, x.v), qkv
    if name == "flash_window":
        return lambda: _windowed(bench.attention, x), qkv
    if importlib.util.find_spec("fla") is None:
        raise ModuleNotFoundError("flash-linear-attention is not installed")
    repeats = bench.heads // bench.kv_heads  # keys and values are repeated outside the measurement
    q, k, v = (
        tensor.detach().transpose(1, 2).repeat_interleave(count, 2).requires_grad_(tensor.requires_grad)
        for tensor, count in ((x.q, 1), (x.k, repeats), (x.v, repeats))
    )
    leaves = [q, k, v] if qkv else []
    if name == "fla":
        from fla.ops.linear_attn import chunk_linear_attn

        return lambda: chunk_linear_attn(q, k, v, normalize=False)[0].transpose(1, 2), leaves
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    decay_BTH = torch.full(q.shape[:3], -0.05, device=q.device)  # a logarithm
    rate_BTH = torch.full(q.shape[:3], 0.5, device=q.device, dtype=q.dtype)
    options = {"g": decay_BTH, "beta": rate_BTH, "use_qk_l2norm_in_kernel": True}
    return lambda: chunk_gated_delta_rule(q, k, v, **options)[0].transpose(1, 2), leaves


def lognormal_lengths(sequences: int, tokens: int, seed: int = 0) -> list[int]:
    """Lengths that sum to `tokens`, each at least 1; the logarithms have a standard deviation of 1."""
    share_N = torch.randn(sequences, generator=torch.Generator().manual_seed(seed)).exp()
    border_N = (share_N.cumsum(0) / share_N.sum() * (tokens - sequences)).round().long()
    return (torch.diff(border_N, prepend=torch.zeros(1, dtype=torch.int64)) + 1).tolist()


def _packed(
    bench: AttentionBench, name: str, x: Inputs, leaves: list[Tensor]
) -> tuple[Callable[[], Tensor], list[Tensor]]:
    if len(x.q) > 1:
        _missing("takes one row")
    lengths = lognormal_lengths(bench.packed_sequences, x.q.shape[2])
    cu_seqlens = torch.tensor([0, *lengths], device=x.q.device).cumsum(0).int()
    if name == "packed":
        return lambda: hybrid_attention(x.q, x.k, x.v, bench.attention, x.params, cu_seqlens=cu_seqlens)[0], leaves
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 has no such argument
        options["enable_gqa"] = bench.heads != bench.kv_heads

    def softmax() -> Tensor:
        q, k, v = (tensor.transpose(1, 2)[0] for tensor in (x.q, x.k, x.v))
        y_THD = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths), **options)
        return y_THD.transpose(0, 1)[None]

    return softmax, [tensor for tensor in (x.q, x.k, x.v) if tensor.requires_grad]
