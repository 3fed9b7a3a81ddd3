"""The plan against measured runs on several GPUs, and of parts of models, from `benchmarks/scaling.py`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lolcats.config import AdjustSection, AttentionSection
from lolcats.plan.gpus import GB, find_gpu
from lolcats.plan.modes import CHECKPOINTING, OFFLOAD, WHOLE, all_modes
from lolcats.plan.request import ModePlan, Request
from lolcats.plan.shape import model_shape

GIB = 2**30
TOKENS = 20_000_000
"""For the hours: of one stage in arXiv:2410.10254."""


@dataclass(frozen=True)
class Measured:
    """One row of a result file.

    Attributes:
        plan: of the same mode, or None if the plan does not know it.
        request: what it was planned for.
        peak_bytes: of the GPU that held most.
        tokens_per_second: of all GPUs together.
    """

    model: str
    layers: int
    whole: bool
    stage: str
    request: Request
    options: tuple[str, ...]
    peak_bytes: float
    tokens_per_second: float
    plan: ModePlan | None


def read_scaling(files: Iterable[Path]) -> list[Measured]:
    """The rows in files of `benchmarks/scaling.py` that were measured on GPUs."""
    found = []
    for path in sorted(files):
        report = json.loads(path.read_text(encoding="utf-8"))
        found += [_measured(report, row) for row in report["rows"] if "error" not in row]
    return found


def _measured(report: dict[str, Any], row: dict[str, Any]) -> Measured:
    settings, train, gpus = report["settings"], report["settings"]["train"], report["processes"]
    adjust = AdjustSection(lora_rank=train["lora_rank"])
    shape = model_shape(train["model"], AttentionSection.model_validate(train["attention"]), adjust)
    layers = settings["layers"] or len(shape.layers)
    whole = layers == len(shape.layers)
    shape = replace(shape, layers=shape.layers[:layers])
    request = Request(
        gpu=find_gpu(report["provenance"]["device"]),
        gpus=gpus,
        tokens=TOKENS,
        sequence_length=row["tokens"],
        batch_size=row["micro_batch"] * gpus,
        micro_batch_size=row["micro_batch"],
        adjust=adjust,
    )
    options: tuple[str, ...] = ()
    if gpus > 1 and not settings["sharded"]:
        options += (WHOLE,)
    if row["row"] == "adjust" and train["gradient_checkpointing"]:
        options += (CHECKPOINTING,)
    if settings["cpu_offload"]:
        options += (OFFLOAD,)
    mode = {"transfer": ("joint", "sharded"), "adjust": ("lora", "lora-sharded")}[row["row"]][gpus > 1]
    plans = [plan for plan in all_modes(shape, request) if (plan.mode, plan.options) == (mode, options)]
    return Measured(
        model=train["model"],
        layers=layers,
        whole=whole,
        stage=row["row"],
        request=request,
        options=options,
        peak_bytes=max(row["peak_gib"]) * GIB,
        tokens_per_second=row["tokens_per_second"],
        plan=plans[0] if plans else None,
    )


def scaling_markdown(rows: Iterable[Measured]) -> str:
    """A table: memory of a GPU, speed of all, measured and planned; hours for `TOKENS` tokens as measured."""
    lines = [
        "| model | stage | GPUs | micro-batch | GB measured | planned | deviation | tokens/s measured | planned"
        " | deviation | hours for 20M tokens |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peak, speed = row.peak_bytes / GB, row.tokens_per_second
        planned = ["", ""], ["", ""]
        if row.plan is not None:
            planned = (
                _against(row.plan.memory.total / GB, peak, ".1f"),
                _against(row.request.trained_tokens / row.plan.seconds, speed, ",.0f"),
            )
        cells = [
            row.model if row.whole else f"{row.model}, {row.layers} layers",
            ", ".join([row.stage, *row.options]),
            str(row.request.gpus),
            str(row.request.micro_batch_size),
            f"{peak:.1f}",
            *planned[0],
            f"{speed:,.0f}",
            *planned[1],
            f"{TOKENS / speed / 3600:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _against(planned: float, measured: float, form: str) -> list[str]:
    return [format(planned, form), f"{planned / measured - 1:+.0%}"]
