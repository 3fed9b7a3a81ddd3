"""Hybrid attention against softmax attention and its own slower implementations, one shape at a time.

    python benchmarks/attention.py --json benchmarks/results/attention_h200.json
    python benchmarks/attention.py --shapes 1x1024,8x4096 --modes forward,train --implementations triton,sdpa_cudnn
    python benchmarks/attention.py --shapes 8x4096 --modes train --profile

Calls are replayed CUDA graphs over rotating inputs, so that they show the kernels; host_us is what an eager call takes
of the host, whatever the kernels take. Nothing is timed that `verify.py` finds wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from attention_calls import IMPLEMENTATIONS, MODES, PEERS, AttentionBench, make_call, make_inputs
from bench_tools import ceilings, describe, host_us, kernel_times, main, measure, sets_for, settings_json
from rich.console import Console
from rich.table import Table
from verify import verify

from lolcats.errors import UserError
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.provenance import provenance


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
                keep(report)
                console.print(_line(row), highlight=False)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return report


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


def profiles(bench: AttentionBench, console: Console) -> Iterator[tuple[str, dict[str, float]]]:
    """(shape and mode, milliseconds of each device kernel in one call of the kernels)."""
    device = torch.device(bench.device)
    for batch, tokens in bench.shapes:
        for mode in bench.modes:
            call = make_call(bench, "triton", mode, make_inputs(bench, batch, tokens, mode, device))
            yield f"{batch} x {tokens} {mode}", kernel_times(call, device)


def _measure(
    bench: AttentionBench, name: str, mode: str, batch: int, tokens: int, device: torch.device
) -> dict[str, Any]:
    first = make_inputs(bench, batch, tokens, mode, device)
    others = (make_inputs(bench, batch, tokens, mode, device) for _ in range(sets_for(first.nbytes, device) - 1))
    calls = [make_call(bench, name, mode, inputs) for inputs in (first, *others)]
    row: dict[str, Any] = {"input_sets": len(calls)}
    if name not in PEERS:
        row["relative_error"] = verify(bench, name, mode, tokens)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        calls[0]()
        row["extra_memory_mib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    row |= measure(calls, device, budget_s=bench.budget_s, capture=device.type == "cuda")
    return row | {"host_us": host_us(calls, device)}


def _shares(bench: AttentionBench, row: dict[str, Any], limits: dict[str, float]) -> dict[str, float]:
    """Of the forward pass of the hybrid operator: rates, and shares of the measured ceilings."""
    if "median_ms" not in row:
        return {}
    shares = {"ns_per_token": row["median_ms"] * 1e6 / (row["batch"] * row["tokens"])}
    if row["mode"] == "forward" and row["implementation"] not in PEERS:
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
    if row["host_us"] is not None:
        line += f"  host {row['host_us']:6.1f} us"
    if "tflop_s" in row:
        line += f"  {row['tflop_s']:6.1f} TFLOP/s ({row['share_of_matmul']:.0%})"
        line += f"  {row['gb_s']:7.1f} GB/s ({row['share_of_copy']:.0%})"
    return line


def print_table(report: dict[str, Any], console: Console) -> None:
    """Shapes and modes down, implementations across: milliseconds of the device, microseconds of the host."""
    names = [name for name in IMPLEMENTATIONS if any(row["implementation"] == name for row in report["rows"])]
    titles = {
        "median_ms": "attention, ms per call (median)",
        "host_us": "the host in an eager call, us (median)",
    }
    for column, title in titles.items():
        if not any(row.get(column) for row in report["rows"]):
            continue
        table = Table("batch x tokens", "mode", *names, title=title)
        cells: dict[tuple[str, str], dict[str, str]] = {}
        for row in report["rows"]:
            key = (f"{row['batch']} x {row['tokens']}", row["mode"])
            value = f"{row[column]:.4g}" if row.get(column) is not None else "-"
            cells.setdefault(key, {})[row["implementation"]] = value
        for key, values in cells.items():
            table.add_row(*key, *(values.get(name, "-") for name in names))
        console.print(table)


if __name__ == "__main__":
    main(globals(), AttentionBench())
