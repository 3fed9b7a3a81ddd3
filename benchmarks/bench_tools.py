"""What the benchmarks share: command lines, models with random weights, times, memory."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.plan import SHAPES
from lolcats.report import write_text

# Inputs rotate over at least this many bytes, several times an H200's L2 cache.
ROTATION_BYTES = 256 * 2**20
MAX_SETS = 16
# Waits for the device, and calls between two of them, when the host's time is measured.
HOST_RUNS, HOST_CALLS = 9, 20


# --- command lines ------------------------------------------------------------------------------------------------


def parser(defaults: Any, description: str | None) -> argparse.ArgumentParser:
    """An option for each field of the dataclass `defaults`, and for each attention setting; lists have commas."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for item in fields(defaults):
        default = getattr(defaults, item.name)
        if is_dataclass(default):
            group = made.add_argument_group(f"{item.name} settings (`AttentionConfig`)")
            for setting in fields(AttentionConfig):
                shown = getattr(default, setting.name)
                kind = {"type": yaml.safe_load, "default": shown, "metavar": "VALUE"}
                group.add_argument(_option(setting.name), **kind, help=f"default: {_text(shown)}")
        elif isinstance(default, bool):
            made.add_argument(_option(item.name), action=argparse.BooleanOptionalAction, default=default)
        elif isinstance(default, tuple):
            made.add_argument(_option(item.name), type=_list_like(item.name, default), default=default, metavar="A,B",
                              help=f"default: {_text(default)}")  # fmt: skip
        else:
            made.add_argument(_option(item.name), type=type(default), default=default, help=f"default: {default}")
    made.add_argument("--json", type=Path, help="write everything measured to this file, anew after every row")
    return made


def settings(defaults: Any, given: argparse.Namespace) -> Any:
    """What the options say, as an object of the type of `defaults`."""
    values = {}
    for item in fields(defaults):
        if is_dataclass(getattr(defaults, item.name)):
            try:
                chosen = AttentionConfig(**{one.name: getattr(given, one.name) for one in fields(AttentionConfig)})
            except ValueError as error:
                raise UserError(str(error)) from error
            values[item.name] = chosen
        else:
            values[item.name] = getattr(given, item.name)
    return type(defaults)(**values)


def main(benchmark: Any, defaults: Any) -> None:
    """Run a benchmark's script by its command line: progress on stderr, tables on stdout, and the file.

    Args:
        benchmark: the script's names: run, print_table and __doc__.

    Raises:
        UserError: settings that it refuses, or a file that cannot be written.
    """
    made = parser(defaults, benchmark["__doc__"])
    given = made.parse_args()
    bench, console, progress = settings(defaults, given), Console(width=200), Console(stderr=True, width=200)
    benchmark["print_table"](benchmark["run"](bench, progress, saver(given.json)), console)


def saver(file: Path | None) -> Callable[[dict[str, Any]], None]:
    """What writes a report whole or not at all; a UserError if it cannot be written."""
    if file is None:
        return lambda report: None
    return lambda report: write_text(file, json.dumps(report, indent=1) + "\n")


def settings_json(bench: Any) -> dict[str, Any]:
    return dict(json.loads(json.dumps(asdict(bench))))


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join("x".join(map(str, entry)) if isinstance(entry, tuple) else str(entry) for entry in value)
    return str(value)


def _list_like(name: str, default: tuple[Any, ...]) -> Callable[[str], tuple[Any, ...]]:
    def read(text: str) -> tuple[Any, ...]:
        kind = type(default[0])
        try:
            if kind is tuple:
                return tuple(_pair(part) for part in text.split(","))
            return tuple(kind(part.strip()) for part in text.split(","))
        except ValueError:
            example = _text(default[:2])
            raise UserError(f"{_option(name)}: expected values such as {example}, got {text!r}") from None

    return read


def _pair(text: str) -> tuple[int, int]:
    batch, tokens = (int(part) for part in text.split("x"))
    if min(batch, tokens) < 1:
        raise ValueError
    return batch, tokens


# --- models -------------------------------------------------------------------------------------------------------


def random_original(shape: str, *, tokens: int, dtype: str, device: str, use_cache: bool = True) -> PreTrainedModel:
    """A softmax model of a known shape with random weights, made on the device in its type; `tokens` as below."""
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=max(tokens, 2048), use_cache=use_cache)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def random_model(shape: str, attention: AttentionConfig, **sizes: Any) -> LolcatsForCausalLM:
    """A linearized model of a known shape with random weights.

    Args:
        sizes: of `random_original`; tokens: longest sequence, `max_position_embeddings`; at least 2048.
    """
    return convert(random_original(shape, **sizes), attention)


def weight_gib(shape: str, dtype: str) -> float:
    """Of the original model; a model on the meta device is enough to count."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[shape]), dtype=getattr(torch, dtype))
    return sum(parameter.nbytes for parameter in model.parameters()) / 2**30


def check_shape(shape: str) -> None:
    if shape not in SHAPES:
        raise UserError(f"no model shape named {shape!r}; there are {', '.join(SHAPES)}")


# --- times and memory ---------------------------------------------------------------------------------------------


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


def host_us(calls: list[Callable[[], object]], device: torch.device) -> float | None:
    """Median microseconds that the host works for a call, over rotating ones; None without a GPU.

    So few calls are made between waits that their launches never fill the device's queue.
    """
    if device.type != "cuda":
        return None
    samples: list[float] = []
    for _ in range(2 + HOST_RUNS):
        synchronize(device)
        begin_s = time.perf_counter()
        for call in itertools.islice(itertools.cycle(calls), HOST_CALLS):
            call()
        samples.append((time.perf_counter() - begin_s) * 1e6 / HOST_CALLS)
        synchronize(device)
    return statistics.median(samples[2:])


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
