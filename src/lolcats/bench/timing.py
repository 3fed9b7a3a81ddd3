"""Measuring device work: times of calls and steps, memory, and the device's own ceilings."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

# Inputs rotate over at least this many bytes, several times an H200's L2 cache.
ROTATION_BYTES = 256 * 2**20
MAX_SETS = 16


Timing = dict[str, Any]
"""median_ms, p10_ms and p90_ms of one call over its runs; captured: as a replayed CUDA graph, without launches."""


def quantile(ordered: list[float], share: float) -> float:
    """Of sorted values, the one that this share of them does not exceed."""
    return ordered[round(share * (len(ordered) - 1))]


def spread(samples_ms: list[float]) -> dict[str, Any]:
    """Statistics of step times. The mean holds the steps at which a block leaves the window, the median does not."""
    ordered = sorted(samples_ms)
    return {
        "step_ms": sum(ordered) / len(ordered),
        "step_ms_median": quantile(ordered, 0.5),
        "step_ms_p10": quantile(ordered, 0.1),
        "step_ms_p90": quantile(ordered, 0.9),
        "step_ms_max": ordered[-1],
        "steps_measured": len(ordered),
    }


def describe(error: Exception) -> str:
    """First line of an error; running out of memory in the same words everywhere."""
    if isinstance(error, torch.OutOfMemoryError) or isinstance(error.__cause__, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def sets_for(bytes_per_set: int, device: torch.device) -> int:
    """How many input sets to rotate over."""
    if device.type != "cuda":
        return 1
    return max(1, min(MAX_SETS, -(-ROTATION_BYTES // max(bytes_per_set, 1))))


def measure(calls: list[Callable[[], object]], device: torch.device, *, budget_s: float, capture: bool) -> Timing:
    """Time of one call, over rotating ones that do the same on different inputs.

    `capture`: replay the calls as one CUDA graph; only for calls that allocate through PyTorch and do not
    synchronize.
    """
    if device.type != "cuda":
        return _measure_host(calls, budget_s)
    for _ in range(2):  # compile, tune, allocate
        for call in calls:
            call()
    torch.cuda.synchronize(device)
    graph = None
    if capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()

    def once() -> None:
        if graph is not None:
            graph.replay()
            return
        for call in calls:
            call()

    def sample() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        once()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / len(calls)

    sample()
    estimate_ms = max(sample() * len(calls), 1e-3)
    runs = max(7, min(200, int(budget_s * 1e3 / estimate_ms)))
    return _timing([sample() for _ in range(runs)], captured=graph is not None)


def _measure_host(calls: list[Callable[[], object]], budget_s: float) -> Timing:
    samples: list[float] = []
    calls[0]()
    deadline = time.perf_counter() + budget_s
    while len(samples) < 3 or (time.perf_counter() < deadline and len(samples) < 200):
        begin = time.perf_counter()
        for call in calls:
            call()
        samples.append((time.perf_counter() - begin) * 1e3 / len(calls))
    return _timing(samples, captured=False)


def _timing(samples_ms: list[float], *, captured: bool) -> Timing:
    ordered = sorted(samples_ms)
    shares = {"p10_ms": quantile(ordered, 0.1), "p90_ms": quantile(ordered, 0.9)}
    return {"median_ms": statistics.median(ordered), **shares, "runs": len(ordered), "captured": captured}


def step_samples(step: Callable[[], object], steps: int, device: torch.device) -> list[float]:
    """Milliseconds of each of `steps` calls; on a GPU between their ends, without waiting in between."""
    if device.type != "cuda":
        samples = []
        for _ in range(steps):
            begin_s = time.perf_counter()
            step()
            samples.append((time.perf_counter() - begin_s) * 1e3)
        return samples
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Give back what nothing refers to any more, and begin counting peak memory anew."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def memory_gib(device: torch.device) -> dict[str, float | None]:
    """Since the last `free`: the most that tensors took, and that PyTorch held; None without a GPU."""
    if device.type != "cuda":
        return {"peak_gib": None, "reserved_gib": None}
    return {
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
    }


def ceilings(device: torch.device, *, budget_s: float = 0.5) -> dict[str, float]:
    """Copy bandwidth (bytes read plus written, TB/s) and bf16 matrix rate (TFLOP/s) of this device."""
    cuda = device.type == "cuda"
    numbers = (2**32 if cuda else 2**25) // 2
    source = torch.empty(numbers, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    copy = measure([lambda: target.copy_(source)], device, budget_s=budget_s, capture=False)
    size = 8192 if cuda else 512
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    product = measure([lambda: a @ b], device, budget_s=budget_s, capture=False)
    return {
        "copy_tb_s": 4 * numbers / copy["median_ms"] / 1e9,
        "matmul_tflop_s": 2 * size**3 / product["median_ms"] / 1e9,
    }


def kernel_times(call: Callable[[], object], device: torch.device, calls: int = 5) -> dict[str, float]:
    """Milliseconds of each device kernel (without a GPU, of each operator) in one call, largest first; a mean."""
    for _ in range(3):
        call()
    with torch.profiler.profile() as recorded:
        for _ in range(calls):
            call()
        synchronize(device)
    on_device = device.type != "cpu"
    times: dict[str, float] = {}
    for event in recorded.events():
        if (event.device_type != torch.profiler.DeviceType.CPU) == on_device:
            spent_us = event.device_time_total if on_device else event.self_cpu_time_total
            times[event.name] = times.get(event.name, 0.0) + spent_us / calls / 1e3
    return dict(sorted(times.items(), key=lambda item: -item[1]))
