"""Hybrid attention against softmax attention and its own slower implementations, one shape at a time.

    python benchmarks/attention.py --json benchmarks/results/attention_h200.json
    python benchmarks/attention.py --shapes 1x1024,8x4096 --modes forward,train --implementations triton,sdpa_cudnn
    python benchmarks/attention.py --shapes 8x4096 --modes train --profile

Calls are replayed CUDA graphs over rotating inputs, so that they show the kernels; `--no-capture` times them with the
host's launches. Reports name the launch configurations: LOLCATS_AUTOTUNE=1 finds the fastest of each kernel's list,
otherwise it is the first.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from bench_tools import ceilings, describe, kernel_times, main, measure, sets_for, settings_json
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lolcats.config.attention import AttentionConfig
from lolcats.errors import UserError
from lolcats.ops import HybridParams, hybrid_attention, output_mse
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.provenance import provenance

# forward: no autograd; train: forward and backward with all gradients; stage1: squared error against given
# outputs, and its gradients of gamma and the feature maps' weights.
MODES = ("forward", "train", "stage1")
IMPLEMENTATIONS = ("triton", "chunked", "reference", "sdpa_flash", "sdpa_cudnn", "fla")
GPU_SHAPES = ((1, 1024), (1, 4096), (1, 16384), (1, 65536), (1, 131072), (16, 4096), (8, 4096))
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
    capture: bool = True  # as CUDA graphs
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


def run(
    bench: AttentionBench, console: Console, keep: Callable[[dict[str, Any]], object] = lambda report: None
) -> dict[str, Any]:
    """Measure everything that fits; rows that cannot run say why.

    Args:
        keep: gets the report after every row, so that an interrupted run loses nothing.
    """
    _check(bench)
    device = torch.device(bench.device)
    limits = ceilings(device)
    rows: list[dict[str, Any]] = []
    report = {"settings": settings_json(bench), "ceilings": limits, "provenance": provenance(), "rows": rows}
    report["launch_configs"] = []
    keep(report)  # a file that cannot be written shows now
    for batch, tokens in bench.shapes:
        for mode in bench.modes:
            for name in bench.implementations:
                if name == "reference" and tokens > bench.max_quadratic_tokens:
                    continue
                row = {"implementation": name, "mode": mode, "batch": batch, "tokens": tokens}
                try:
                    row |= _measure(bench, name, mode, batch, tokens, device)
                except Exception as error:  # a peer that is missing or refuses the shape is a result, too
                    row["error"] = describe(error)
                row |= _shares(bench, row, limits)
                rows.append(row)
                report["launch_configs"] = launch_configs()
                keep(report)
                console.print(_line(row), highlight=False)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return report


def launch_configs() -> list[dict[str, str]]:
    """What this process has launched each kernel with so far; with LOLCATS_AUTOTUNE=1 the fastest of its list."""
    if importlib.util.find_spec("triton") is None:
        return []
    from lolcats.ops.hybrid_attention.kernels.launch import chosen_configs

    return [{"kernel": name, "call": call, "config": config} for (name, call), config in chosen_configs.items()]


def _check(bench: AttentionBench) -> None:
    if bench.heads % bench.kv_heads:
        raise UserError(f"heads={bench.heads} is not a multiple of kv_heads={bench.kv_heads}")
    for given, known in ((bench.implementations, IMPLEMENTATIONS), (bench.modes, MODES)):
        for name in given:
            if name not in known:
                raise UserError(f"there is no {name!r}; choose of {', '.join(known)}")


def work(bench: AttentionBench, batch: int, tokens: int) -> tuple[float, float]:
    """Floors of one forward pass: bytes (q, k, v read once, y written once) and FLOPs (see the docs).

    Counted for full windows: every query meets `capacity` keys in blocks that matrix units can take, its
    features meet one state; keys meet their feature map and the state once per state head.
    """
    D, P = bench.head_dim, bench.columns
    itemsize = getattr(torch, bench.dtype).itemsize
    moved = batch * tokens * D * (2 * bench.heads + 2 * bench.kv_heads) * itemsize
    keys = min(bench.attention.capacity + bench.attention.sinks, tokens)
    per_query = 4 * keys * D
    per_key = 0
    if bench.attention.feature_map is not None:
        F = P * get_feature_map(bench.attention.feature_map).multiple
        per_query += 2 * D * P + 2 * F * D
        per_key = 2 * D * P + 2 * F * D
    return moved, batch * tokens * (bench.heads * per_query + bench.state_heads * per_key)


def make_inputs(bench: AttentionBench, batch: int, tokens: int, mode: str, device: torch.device) -> Inputs:
    """Random activations as projections leave them: [B, T, H, D] in memory, seen as [B, H, T, D]."""
    dtype = getattr(torch, bench.dtype)
    D, P = bench.head_dim, bench.columns

    def activation(heads: int) -> Tensor:
        return torch.randn(batch, tokens, heads, D, device=device).to(dtype).transpose(1, 2)

    state_heads = bench.state_heads
    params = HybridParams(gamma=torch.full((bench.heads,), 0.5, device=device))
    if bench.attention.feature_map is not None:
        params = params._replace(
            q_weight=torch.randn(bench.heads, D, P, device=device) / math.sqrt(D),
            k_weight=torch.randn(state_heads, D, P, device=device) / math.sqrt(D),
        )
        if get_feature_map(bench.attention.feature_map).has_bias:
            params = params._replace(
                q_bias=torch.zeros(bench.heads, P, device=device), k_bias=torch.zeros(state_heads, P, device=device)
            )
    q, dy = activation(bench.heads), activation(bench.heads)
    inputs = Inputs(q, activation(bench.kv_heads), activation(bench.kv_heads), dy, params)
    learned = [tensor for tensor in params if tensor is not None]
    for tensor in {"forward": [], "stage1": learned, "train": [inputs.q, inputs.k, inputs.v, *learned]}[mode]:
        tensor.requires_grad_()
    return inputs


def make_call(bench: AttentionBench, name: str, mode: str, inputs: Inputs) -> Callable[[], object]:
    """One call of an implementation: the forward pass, or forward and backward."""
    if mode == "stage1":
        x, learned = inputs, [tensor for tensor in inputs.params if tensor is not None]

        def transfer() -> object:
            loss = output_mse(x.q, x.k, x.v, x.dy, bench.attention, x.params, backend=name)
            return torch.autograd.grad(loss, learned)

        return transfer
    forward, leaves = _forward(bench, name, inputs)
    if mode == "forward":
        return torch.no_grad()(forward)

    def both() -> object:
        return torch.autograd.grad(forward(), leaves, inputs.dy)

    return both


def profiles(bench: AttentionBench, console: Console) -> Iterator[tuple[str, dict[str, float]]]:
    """(shape and mode, milliseconds of each device kernel in one call of the kernels)."""
    device = torch.device(bench.device)
    for batch, tokens in bench.shapes:
        for mode in bench.modes:
            call = make_call(bench, "triton", mode, make_inputs(bench, batch, tokens, mode, device))
            yield f"{batch} x {tokens} {mode}", kernel_times(call, device)


def _forward(bench: AttentionBench, name: str, x: Inputs) -> tuple[Callable[[], Tensor], list[Tensor]]:
    leaves = [tensor for tensor in (x.q, x.k, x.v, *x.params) if tensor is not None and tensor.requires_grad]
    if name in ("triton", "chunked", "reference"):
        return lambda: hybrid_attention(x.q, x.k, x.v, bench.attention, x.params, backend=name)[0], leaves
    qkv = [tensor for tensor in (x.q, x.k, x.v) if tensor.requires_grad]
    if name.startswith("sdpa"):
        kind = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}[name]
        context = (lambda: sdpa_kernel(kind)) if x.q.is_cuda else nullcontext

        def softmax() -> Tensor:
            with context():
                return scaled_dot_product_attention(
                    x.q, x.k, x.v, is_causal=True, enable_gqa=bench.heads != bench.kv_heads
                )

        return softmax, qkv
    if importlib.util.find_spec("fla") is None:
        raise ModuleNotFoundError("flash-linear-attention is not installed")
    from fla.ops.linear_attn import chunk_linear_attn

    repeats = bench.heads // bench.kv_heads  # keys and values are repeated outside the measurement
    q, k, v = (
        tensor.detach().transpose(1, 2).repeat_interleave(count, 2).requires_grad_(tensor.requires_grad)
        for tensor, count in ((x.q, 1), (x.k, repeats), (x.v, repeats))
    )
    return lambda: chunk_linear_attn(q, k, v, normalize=False)[0].transpose(1, 2), [q, k, v] if qkv else []


def _measure(
    bench: AttentionBench, name: str, mode: str, batch: int, tokens: int, device: torch.device
) -> dict[str, Any]:
    if mode == "stage1" and name not in ("triton", "chunked", "reference"):
        return {"error": "has no feature maps to train"}
    first = make_inputs(bench, batch, tokens, mode, device)
    others = (make_inputs(bench, batch, tokens, mode, device) for _ in range(sets_for(first.nbytes, device) - 1))
    calls = [make_call(bench, name, mode, inputs) for inputs in (first, *others)]
    if device.type == "cuda":
        calls[0]()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        calls[0]()
        extra = torch.cuda.max_memory_allocated(device) - before
    else:
        extra = None
    capture = bench.capture and device.type == "cuda"
    timing = measure(calls, device, budget_s=bench.budget_s, capture=capture)
    return {**timing, "input_sets": len(calls), "extra_memory_mib": None if extra is None else extra / 2**20}


def _shares(bench: AttentionBench, row: dict[str, Any], limits: dict[str, float]) -> dict[str, float]:
    """Of the forward pass of the hybrid operator: rates, and shares of the measured ceilings."""
    if "median_ms" not in row:
        return {}
    shares = {"ns_per_token": row["median_ms"] * 1e6 / (row["batch"] * row["tokens"])}
    if row["mode"] == "forward" and row["implementation"] in ("triton", "chunked"):
        moved, flops = work(bench, row["batch"], row["tokens"])
        shares |= {"gb_s": moved / row["median_ms"] / 1e6, "tflop_s": flops / row["median_ms"] / 1e9}
        shares["share_of_copy"] = shares["gb_s"] / 1e3 / limits["copy_tb_s"]
        shares["share_of_matmul"] = shares["tflop_s"] / limits["matmul_tflop_s"]
    return shares


def _line(row: dict[str, Any]) -> str:
    head = f"{row['batch']:>3} x {row['tokens']:<6} {row['mode']:<8}{row['implementation']:<11}"
    if "error" in row:
        return f"{head} {row['error']}"
    line = f"{head} {row['median_ms']:9.4f} ms  [{row['p10_ms']:.4f}, {row['p90_ms']:.4f}]"
    if "tflop_s" in row:
        line += f"  {row['tflop_s']:6.1f} TFLOP/s ({row['share_of_matmul']:.0%})"
        line += f"  {row['gb_s']:7.1f} GB/s ({row['share_of_copy']:.0%})"
    return line


def print_table(report: dict[str, Any], console: Console) -> None:
    """Milliseconds, shapes and modes down, implementations across."""
    names = [name for name in IMPLEMENTATIONS if any(row["implementation"] == name for row in report["rows"])]
    table = Table("batch x tokens", "mode", *names, title="attention, ms per call (median)")
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in report["rows"]:
        key = (f"{row['batch']} x {row['tokens']}", row["mode"])
        value = f"{row['median_ms']:.4g}" if "median_ms" in row else "-"
        cells.setdefault(key, {})[row["implementation"]] = value
    for key, values in cells.items():
        table.add_row(*key, *(values.get(name, "-") for name in names))
    console.print(table)
    for chosen in report["launch_configs"]:
        console.print(f"{chosen['kernel']}: {chosen['config']} for {chosen['call']}", highlight=False, markup=False)


if __name__ == "__main__":
    main(globals(), AttentionBench())
