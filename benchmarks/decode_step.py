"""One layer's decoding step on a GPU, by batch size and launch configuration of the kernel that reads the states.

    python benchmarks/decode_step.py --json benchmarks/results/decode_step_h200.json
    python benchmarks/decode_step.py --batches 2048 --configs 32-64-2-2,64-64-2-3 --spread

Microseconds of both launches in a replayed CUDA graph, over the states of several layers in turn; floor_us is the time
in which the device can copy the bytes that a step must read. A configuration is BN-BF-warps-stages; "usual" stands for
what the package takes. One whose outputs are wrong is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from attention_calls import AttentionBench, make_inputs
from bench_tools import ceilings, describe, free, main, measure, sets_for, settings_json
from rich.console import Console
from rich.table import Table
from verify import TOLERANCE, relative_error

from lolcats.config.attention import AttentionConfig
from lolcats.errors import UserError
from lolcats.ops import HybridState, hybrid_attention, initial_state
from lolcats.ops.hybrid_attention.kernels import decode
from lolcats.ops.hybrid_attention.kernels.launch import _plans
from lolcats.provenance import provenance

USUAL = "usual"
CONFIGS = (
    *("32-32-2-2", "32-64-2-2", "64-64-2-2", "32-128-2-2", "64-128-2-2", "32-64-2-3", "64-64-2-3", "32-32-2-3"),
    *("64-64-4-2", "64-128-4-2", "64-64-4-3", "64-128-4-3", "128-128-4-2", "64-64-4-1", "64-128-4-1", "32-32-2-1"),
)


@dataclass(frozen=True)
class StepBench:
    """What to measure. The defaults are one layer of the Llama-3-8B shape in the middle of a block."""

    batches: tuple[int, ...] = (1, 8, 64, 512, 1024, 2048)
    configs: tuple[str, ...] = (USUAL, *CONFIGS)
    position: int = 3233  # of every sequence
    spread: bool = False  # over a block from there: a sequence in each 64 adds a block to its state in every step
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    attention: AttentionConfig = field(default_factory=lambda: AttentionConfig(feature_dim=64))
    dtype: str = "bfloat16"
    device: str = "cuda"
    budget_s: float = 0.3  # per number


def run(
    bench: StepBench, console: Console, keep: Callable[[dict[str, Any]], object] = lambda report: None
) -> dict[str, Any]:
    """Measure every configuration at every batch size; those that cannot run say why."""
    device = torch.device(bench.device)
    limits = ceilings(device)
    rows: list[dict[str, Any]] = []
    report = {"settings": settings_json(bench), "ceilings": limits, "provenance": provenance(), "rows": rows}
    keep(report)  # a file that cannot be written shows now
    few, many = decode._FEW, decode._MANY
    try:
        for batch in bench.batches:
            states, calls = _calls(bench, batch, device)
            floor_us = _bytes_read(bench, states[0]) / limits["copy_tb_s"] / 1e6
            for name in bench.configs:
                decode._FEW, decode._MANY = (few, many) if name == USUAL else (_config(name),) * 2
                _plans.clear()
                row: dict[str, Any] = {"batch": batch, "config": name, "floor_us": floor_us}
                try:
                    row["relative_error"] = _verify(bench, batch, device)
                    row |= measure(calls, device, budget_s=bench.budget_s, capture=device.type == "cuda")
                    row["us"] = row.pop("median_ms") * 1e3
                except Exception as error:  # too much shared memory is a result, too
                    row["error"] = describe(error)
                rows.append(row)
                keep(report)
                result = row.get("error") or f"{row['us']:9.2f} us"
                console.print(f"{batch:>5}  {name:<12} {result}  floor {floor_us:.1f}", highlight=False)
            del states, calls
            free(device)
    finally:
        decode._FEW, decode._MANY = few, many
    return report


def _config(name: str) -> dict[str, int]:
    try:
        return dict(zip(("BN", "BF", "num_warps", "num_stages"), map(int, name.split("-")), strict=True))
    except ValueError:
        raise UserError(f"config {name!r}: expected BN-BF-warps-stages, such as {CONFIGS[0]}") from None


def _calls(bench: StepBench, batch: int, device: torch.device) -> tuple[list[HybridState], list[Callable[[], object]]]:
    """States of several layers, and a step of each."""
    states = [_state(bench, batch, device)]
    states += [_state(bench, batch, device) for _ in range(sets_for(states[0].nbytes, device) - 1)]
    return states, [_step(bench, batch, state, device) for state in states]


@torch.no_grad()
def _state(bench: StepBench, batch: int, device: torch.device) -> HybridState:
    """Random, as decoding keeps it."""
    x = make_inputs(_one_token(bench), batch, 1, "step", device)
    state = initial_state(bench.attention, x.params, x.k)
    for name in ("S", "z", "k", "v", "sink_k", "sink_v"):
        getattr(state, name).normal_()
    state.z.abs_().add_(1.0)
    state.position += bench.position
    if bench.spread:
        state.position += torch.arange(batch, device=device) % max(bench.attention.window_size, 1)
    inputs = (x.q, x.k, x.v, bench.attention, x.params)
    after = hybrid_attention(*inputs, state=state, return_state=True, inplace=True)[1]
    assert after is not None
    return after


def _step(
    bench: StepBench, batch: int, state: HybridState, device: torch.device, backend: str = "auto"
) -> Callable[[], torch.Tensor]:
    x = make_inputs(_one_token(bench), batch, 1, "step", device)
    options: dict[str, Any] = {"state": state, "return_state": True, "inplace": True, "backend": backend}

    @torch.no_grad()
    def step() -> torch.Tensor:
        return hybrid_attention(x.q, x.k, x.v, bench.attention, x.params, **options)[0]

    return step


def _one_token(bench: StepBench) -> AttentionBench:
    sizes = {name: getattr(bench, name) for name in ("heads", "kv_heads", "head_dim", "attention", "dtype", "device")}
    return AttentionBench(**sizes)


def _verify(bench: StepBench, batch: int, device: torch.device) -> float:
    """Relative RMS error of as many steps as a block has, of few sequences, from the plain step in float32 sums."""
    few, found, expected = min(batch, 4), [], []
    state = _state(bench, few, device)
    steps = []
    for into, backend in ((found, "auto"), (expected, "chunked")):
        torch.manual_seed(0)
        steps.append((into, _step(bench, few, state.clone(), device, backend)))
    for into, step in steps:
        into += [step() for _ in range(max(bench.attention.window_size, 1) + 1)]
    error = relative_error(torch.stack(found), torch.stack(expected))
    if not error <= TOLERANCE[getattr(torch, bench.dtype)]:
        raise UserError(f"wrong, not timed: {error:.1e} from the plain step")
    return error


def _bytes_read(bench: StepBench, state: HybridState) -> int:
    """What a step must read: the sums' upper halves or all of them, z, and of the ring what the window sees."""
    config = bench.attention
    share_of_S = 2 if state.S.dtype == torch.int16 else 1
    seen = config.window_size
    if config.window == "terraced":
        seen = (config.window_blocks - 1) * config.window_size + bench.position % config.window_size
    share_of_ring = seen / max(config.capacity, 1)
    ring = state.k.nbytes + state.v.nbytes
    return int(state.S.nbytes / share_of_S + state.z.nbytes + ring * share_of_ring + state.sink_k.nbytes * 2)


def print_table(report: dict[str, Any], console: Console) -> None:
    """Batch sizes down, configurations across."""
    batches = list(dict.fromkeys(row["batch"] for row in report["rows"]))
    names = list(dict.fromkeys(row["config"] for row in report["rows"]))
    table = Table("configuration", *map(str, batches), title="one layer's step, us (median)")
    cells = {(row["config"], row["batch"]): row.get("us") for row in report["rows"]}
    for name in names:
        table.add_row(name, *(f"{us:.1f}" if (us := cells.get((name, batch))) else "-" for batch in batches))
    floors = {row["batch"]: row["floor_us"] for row in report["rows"]}
    table.add_row("floor", *(f"{floors[batch]:.1f}" for batch in batches))
    console.print(table)


if __name__ == "__main__":
    main(globals(), StepBench())
