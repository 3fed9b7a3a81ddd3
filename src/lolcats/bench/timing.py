"""Measuring device work: times of calls and steps, memory, and the device's own ceilings."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# Inputs rotate over at least this many bytes, several times an H200's L2 cache.
ROTATION_BYTES = 256 * 2**20
MAX_SETS = 16


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median over repeated runs, and the 10th and 90th percentile."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    runs: int
    captured: bool  # a replayed CUDA graph, without the host's launch overhead

    @classmethod
    def of(cls, samples_ms: list[float], *, captured: bool) -> Timing:
        ordered = sorted(samples_ms)
        last = len(ordered) - 1
        return cls(
            statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered), captured
        )


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
    return Timing.of([sample() for _ in range(runs)], captured=graph is not None)


def _measure_host(calls: list[Callable[[], object]], budget_s: float) -> Timing:
    samples: list[float] = []
    calls[0]()
    deadline = time.perf_counter() + budget_s
    while len(samples) < 3 or (time.perf_counter() < deadline and len(samples) < 200):
        begin = time.perf_counter()
        for call in calls:
            call()
        samples.append((time.perf_counter() - begin) * 1e3 / len(calls))
    return Timing.of(samples, captured=False)


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
    gc.collect()
    if device.type == "cuda":
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
        "copy_tb_s": 4 * numbers / copy.median_ms / 1e9,
        "matmul_tflop_s": 2 * size**3 / product.median_ms / 1e9,
    }


def kernel_times(call: Callable[[], object], device: torch.device, calls: int = 5) -> dict[str, float]:
    """Milliseconds of each device kernel in one call, largest first; the mean over some calls after others."""
    for _ in range(3):
        call()
    with torch.profiler.profile() as recorded:
        for _ in range(calls):
            call()
        synchronize(device)
    times: dict[str, float] = {}
    for event in recorded.events():
        if event.device_type != torch.profiler.DeviceType.CPU:
            times[event.name] = times.get(event.name, 0.0) + event.device_time_total / calls / 1e3
    return dict(sorted(times.items(), key=lambda item: -item[1]))
