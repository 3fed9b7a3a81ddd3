"""How much of a GPU's peak rate training reaches, from measured runs.

`throughput.json` is written by `benchmarks/plan_check.py --update` from the files in benchmarks/results; every row
names its source. Utilisation grows with the size of the matrix products: it is interpolated between the measured
hidden sizes, and at each of them between the measured tokens of a micro-step, both on a logarithmic scale. Outside
of what was measured the nearest value holds.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lolcats.plan.gpus import Gpu

FILE = Path(__file__).parent / "throughput.json"
STAGES = ("transfer", "adjust", "frozen")


@dataclass(frozen=True)
class Rate:
    """Useful FLOP/s of one GPU.

    Attributes:
        utilisation: share of the peak rate.
        measured_on: name of the GPU of the measurement.
        scaled: it is not the GPU of the plan, whose rate is assumed to be the same share of its peak.
    """

    tflop_s: float
    utilisation: float
    measured_on: str
    scaled: bool


@cache
def measured() -> tuple[dict[str, Any], ...]:
    """Rows of the table: gpu, stage, model, hidden_size, micro_batch, tokens, tokens_per_second, tflop_s,
    utilisation, source."""
    return tuple(json.loads(FILE.read_text(encoding="utf-8"))["rows"])


def rate(gpu: Gpu, stage: str, hidden: int, step_tokens: int, rows: tuple[dict[str, Any], ...] | None = None) -> Rate:
    """What to expect of `stage` for a model of this hidden size.

    Args:
        stage: one of `STAGES`.
        step_tokens: of a micro-step.
        rows: in place of the package's own table.
    """
    of_stage = [row for row in (measured() if rows is None else rows) if row["stage"] == stage]
    same = [row for row in of_stage if row["gpu"] == gpu.name]
    by_hidden: dict[int, dict[int, float]] = {}
    for row in same or of_stage:
        by_hidden.setdefault(row["hidden_size"], {})[row["micro_batch"] * row["tokens"]] = row["utilisation"]
    utilisation = _interpolate({size: _interpolate(points, step_tokens) for size, points in by_hidden.items()}, hidden)
    origin = (same or of_stage)[0]["gpu"]
    return Rate(utilisation * gpu.peak_tflop_s, utilisation, origin, scaled=not same)


def _interpolate(points: dict[int, float], at: int) -> float:
    below = max((place for place in points if place <= at), default=min(points))
    above = min((place for place in points if place >= at), default=max(points))
    if below >= above:
        return points[below]
    share = math.log(at / below) / math.log(above / below)
    return points[below] + share * (points[above] - points[below])
