"""A batch of sequences of lognormal lengths, packed into one row, against one sequence of as many tokens.

    python benchmarks/attention_ragged.py --sequences 32 --tokens 32768 --json benchmarks/results/ragged_h200.json

packed: the operator with cu_seqlens; dense: the operator, one sequence; varlen_attn: FlashAttention-2 in PyTorch.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attention_calls import AttentionBench, Inputs, make_inputs
from bench_tools import describe, measure, saver, sets_for, settings_json
from rich.console import Console

from lolcats.ops import hybrid_attention
from lolcats.provenance import provenance

IMPLEMENTATIONS = ("packed", "dense", "varlen_attn")
MODES = ("forward", "train")


def lognormal_lengths(sequences: int, tokens: int, seed: int = 0) -> list[int]:
    """Lengths that sum to `tokens`, each at least 1; the logarithms have a standard deviation of 1."""
    share_N = torch.randn(sequences, generator=torch.Generator().manual_seed(seed)).exp()
    border_N = (share_N.cumsum(0) / share_N.sum() * (tokens - sequences)).round().long()
    return (torch.diff(border_N, prepend=torch.zeros(1, dtype=torch.int64)) + 1).tolist()


def run(bench: AttentionBench, sequences: int, tokens: int, console: Console) -> list[dict[str, Any]]:
    """Forward, and forward with backward; rows that cannot run say why."""
    device = torch.device(bench.device)
    lengths = lognormal_lengths(sequences, tokens)
    rows = []
    for mode in MODES:
        for name in IMPLEMENTATIONS:
            row: dict[str, Any] = {"implementation": name, "mode": mode, "lengths": lengths}
            try:
                first = make_inputs(bench, 1, tokens, mode, device)
                more = sets_for(first.nbytes, device) - 1
                sets = [first, *(make_inputs(bench, 1, tokens, mode, device) for _ in range(more))]
                calls = [make_call(bench, name, mode, inputs, lengths) for inputs in sets]
                row |= measure(calls, device, budget_s=bench.budget_s, capture=device.type == "cuda")
                row["ns_per_token"] = row["median_ms"] * 1e6 / tokens
                result = f"{row['median_ms']:9.4f} ms  {row['ns_per_token']:7.2f} ns per token"
            except Exception as error:  # a peer that is missing or refuses the call is a result, too
                row["error"] = result = describe(error)
            rows.append(row)
            console.print(f"{sequences} in {tokens:<7} {mode:<8}{name:<12} {result}", highlight=False)
    return rows


def make_call(bench: AttentionBench, name: str, mode: str, x: Inputs, lengths: list[int]) -> Callable[[], object]:
    """One call: the forward pass, or forward and backward."""
    cu_seqlens = torch.tensor([0, *lengths], device=x.q.device).cumsum(0).int()
    leaves = [tensor for tensor in (x.q, x.k, x.v, *x.params.tensors) if tensor is not None]
    dy = x.dy
    forward: Callable[[], Any]
    if name == "varlen_attn":
        from torch.nn.attention.varlen import varlen_attn

        longest, leaves, dy = max(lengths), leaves[:3], x.dy.transpose(1, 2)[0]
        options: dict[str, Any] = {"window_size": (-1, 0)}
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 has no such argument
            options["enable_gqa"] = bench.heads != bench.kv_heads

        def forward() -> Any:
            q, k, v = (tensor.transpose(1, 2)[0] for tensor in (x.q, x.k, x.v))
            return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
    else:
        borders = cu_seqlens if name == "packed" else None
        backend = "triton" if x.q.is_cuda else "chunked"

        def forward() -> Any:
            return hybrid_attention(x.q, x.k, x.v, bench.attention, x.params, cu_seqlens=borders, backend=backend)[0]

    if mode == "forward":
        return torch.no_grad()(forward)
    return lambda: torch.autograd.grad(forward(), leaves, dy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32768, help="of all sequences together")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    bench = AttentionBench()
    rows = run(bench, given.sequences, given.tokens, Console(width=200))
    saver(given.json)({"settings": settings_json(bench), "provenance": provenance(), "rows": rows})


if __name__ == "__main__":
    main()
