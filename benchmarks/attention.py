"""Hybrid attention against softmax attention and its own slower implementations, one shape at a time.

    python benchmarks/attention.py --json benchmarks/results/attention_h200.json
    python benchmarks/attention.py --shapes 1x1024,8x4096 --modes forward,train --implementations triton,sdpa_cudnn

Calls are replayed CUDA graphs over rotating inputs, so that they show the kernels; host_us is what an eager call takes
of the host, whatever the kernels take. Nothing is timed that `verify.py` finds wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attention_calls import IMPLEMENTATIONS, MODES, PEERS, AttentionBench, make_call, make_inputs
from bench_tools import describe, host_us, main, measure, sets_for, settings_json
from rich.console import Console
from rich.table import Table
from verify import verify

from lolcats.errors import UserError
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
    rows: list[dict[str, Any]] = []
    report = {"settings": settings_json(bench), "provenance": provenance(), "rows": rows}
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
    row["ns_per_token"] = row["median_ms"] * 1e6 / (batch * tokens)
    return row | {"host_us": host_us(calls, device)}


def _line(row: dict[str, Any]) -> str:
    head = f"{row['batch']:>3} x {row['tokens']:<6} {row['mode']:<8}{row['implementation']:<11}"
    if "error" in row:
        return f"{head} {row['error']}"
    line = f"{head} {row['median_ms']:9.4f} ms  [{row['p10_ms']:.4f}, {row['p90_ms']:.4f}]"
    if row["host_us"] is not None:
        line += f"  host {row['host_us']:6.1f} us"
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
