"""What the decoding benchmark measures, and what its sections share: the model, time left, rows found so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console

from lolcats.bench.models import random_model
from lolcats.bench.timing import free
from lolcats.config.attention import AttentionConfig
from lolcats.modeling.model import LolcatsForCausalLM

# throughput: many sequences, linearized; softmax: the same with the original attention; latency: one sequence at
# several positions, both; prefill: long prompts, both; endurance: one sequence for very long, linearized.
SECTIONS = ("throughput", "softmax", "latency", "prefill", "endurance")
SHARES = {"throughput": 0.38, "softmax": 0.13, "latency": 0.1, "prefill": 0.21, "endurance": 0.18}  # of the time
_GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class DecodeBench:
    """What to measure. Lists are tried in their order, so that what is missing at the end is the largest."""

    model: str = "llama3-8b" if _GPU else "tiny"
    sections: tuple[str, ...] = SECTIONS
    batches: tuple[int, ...] = (1, 16, 64, 256, 512, 1024, 2048) if _GPU else (1, 2)
    softmax_batches: tuple[int, ...] = (1, 16, 64, 128, 192, 256) if _GPU else (1, 2)
    prompt_tokens: int = 128
    new_tokens: int = 4096  # of a sequence, in the throughput and softmax sections
    blocks: int = 2  # terraced blocks over which steps are timed
    contexts: int = 4  # lengths at which softmax steps are timed, from the first to the last of a run
    softmax_steps: int = 8  # timed at each length
    full_run_batch: int = 0  # generate all new tokens at this batch size; 0: extrapolate only
    positions: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000) if _GPU else (1_000, 4_000)
    prefill_lengths: tuple[int, ...] = (1024, 8192, 32768, 131072) if _GPU else (256, 1024)
    prefill_chunk: int = 8192 if _GPU else 256  # tokens of one forward pass, over all its sequences
    endurance_model: str = "smollm2-135m" if _GPU else "tiny"
    endurance_layers: int = 0  # 0: all of the shape's
    endurance_tokens: int = 50_000 if _GPU else 200
    endurance_chunk: int = 1000 if _GPU else 50  # steps between looks at the device
    seconds: float = 230.0  # for everything; sections stop in time, after what they are at
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    dtype: str = "bfloat16" if _GPU else "float32"
    device: str = "cuda" if _GPU else "cpu"


class Session:
    """One run of the benchmark.

    Args:
        bench: its settings.
        console: where progress goes.
        keep: called after every row, for instance to write the report to a file.

    Attributes:
        limits: measured ceilings of the device (`timing.ceilings`).
        report: all that was found so far.
    """

    def __init__(self, bench: DecodeBench, console: Console, keep: Callable[[dict[str, Any]], object]) -> None:
        self.bench, self.console, self.keep = bench, console, keep
        self.device = torch.device(bench.device)
        self.report: dict[str, Any] = {}
        self.limits: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []  # of the section that runs
        self._began_s = time.perf_counter()
        self._section_ends_s = float("inf")
        self._model: tuple[tuple[str, int], LolcatsForCausalLM] | None = None

    def model(self, shape: str, layers: int = 0) -> LolcatsForCausalLM:
        """The model of a shape, with fewer layers if not 0; the one before is dropped."""
        if self._model is None or self._model[0] != (shape, layers):
            self._model = None
            free(self.device)
            began_s = time.perf_counter()
            model = random_model(
                shape,
                self.bench.attention,
                tokens=self.bench.prompt_tokens + self.bench.new_tokens,
                dtype=self.bench.dtype,
                device=self.bench.device,
                layers=layers or None,
            )
            self._model = (shape, layers), model
            self.say(f"model {shape} made in {time.perf_counter() - began_s:.1f} s")
        return self._model[1]

    def begin_section(self, name: str) -> list[dict[str, Any]]:
        """Start a section's clock: its share of the time that is left, of what sections to come would get."""
        sections = self.bench.sections
        shares = [SHARES[other] for other in sections[sections.index(name) :]]
        left_s = max(self.bench.seconds - self.elapsed_s, 0.0)
        self._section_ends_s = time.perf_counter() + left_s * shares[0] / sum(shares)
        self.rows = []
        return self.rows

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began_s

    @property
    def left_s(self) -> float:
        """Of the section's time; may be negative."""
        return self._section_ends_s - time.perf_counter()

    def record(self, row: dict[str, Any], line: str) -> None:
        """Add a row to the section."""
        self.rows.append(row)
        self.say(f"{line} {row['error']}" if "error" in row else line)
        self.keep(self.report)

    def out_of_time(self, row: dict[str, Any], line: str) -> bool:
        """Whether the section's time is over; then the row says so."""
        if self.left_s > 0:
            return False
        self.record({**row, "error": "not measured: the section's time was over; raise --seconds"}, line)
        return True

    def say(self, line: str) -> None:
        self.console.print(f"{self.elapsed_s:6.1f} s  {line}", highlight=False, markup=False, soft_wrap=True)


def spread(samples_ms: list[float]) -> dict[str, Any]:
    """Statistics of step times. The mean holds the steps that fold a block, the median does not."""
    ordered = sorted(samples_ms)
    p10, median, p90 = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9))
    return {
        "step_ms": sum(ordered) / len(ordered),
        "step_ms_median": median,
        "step_ms_p10": p10,
        "step_ms_p90": p90,
        "step_ms_max": ordered[-1],
        "steps_measured": len(ordered),
    }


def describe(error: Exception) -> str:
    """First line of an error; running out of memory in the same words everywhere."""
    if isinstance(error, torch.OutOfMemoryError) or isinstance(error.__cause__, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
