"""The plan against measured runs: the throughput table from result files, and what the plan would have said of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lolcats.config import AdjustSection, AttentionSection
from lolcats.plan import memory, work
from lolcats.plan.gpus import GB, find_gpu
from lolcats.plan.memory import Step
from lolcats.plan.shape import ModelShape, model_shape
from lolcats.plan.throughput import STAGES, rate

GIB = 2**30


@dataclass(frozen=True)
class Run:
    """One measured training speed.

    Attributes:
        stage: of `STAGES`.
        peak_bytes: most that tensors took on the GPU; None where it was not measured apart.
        source: file and row.
        whole: a whole run with its data, not a benchmark's steps; it is no row of the throughput table.
    """

    gpu: str
    stage: str
    shape: ModelShape
    micro_batch: int
    tokens: int
    tokens_per_second: float
    peak_bytes: float | None
    adjust: AdjustSection
    source: str
    whole: bool = False

    @property
    def flops_per_token(self) -> float:
        layers = self.shape.layers
        if self.stage == "transfer":
            return work.transfer(layers, self.tokens, self.shape.mean_window)
        if self.stage == "adjust":
            return work.adjust(self.shape, self.tokens, self.adjust)
        return work.frozen(layers, self.tokens)

    @property
    def tflop_s(self) -> float:
        return self.flops_per_token * self.tokens_per_second / 1e12


def read_runs(files: Iterable[Path]) -> list[Run]:
    """The runs in files of `benchmarks/train.py`."""
    runs = []
    for path in sorted(files):
        report = json.loads(path.read_text(encoding="utf-8"))
        settings = report["settings"]
        attention = AttentionSection.model_validate(settings["attention"])
        adjust = AdjustSection(
            lora_rank=settings["lora_rank"], gradient_checkpointing=settings["gradient_checkpointing"]
        )
        shape = model_shape(settings["model"], attention, adjust)
        for row in report["rows"]:
            if row["row"] not in STAGES or "error" in row:
                continue
            runs.append(
                Run(
                    gpu=find_gpu(report["provenance"]["device"]).name,
                    stage=row["row"],
                    shape=shape,
                    micro_batch=row["micro_batch"],
                    tokens=row["tokens"],
                    tokens_per_second=row["tokens_per_second"],
                    peak_bytes=row["peak_gib"] * GIB,
                    adjust=adjust,
                    source=f"benchmarks/results/{path.name}, row {row['row']}",
                )
            )
    return runs


def read_whole_runs(files: Iterable[Path], model: str) -> list[Run]:
    """Both stages of the runs in files of `benchmarks/quality_smollm2.py`.

    Args:
        model: shape of their model.
    """
    runs = []
    for path in sorted(files):
        for name, report in json.loads(path.read_text(encoding="utf-8")).items():
            if not isinstance(report, dict) or "stages" not in report:
                continue
            config = report["config"]
            attention = AttentionSection.model_validate(config["attention"])
            adjust = AdjustSection.model_validate(config["adjust"])
            shape = model_shape(model, attention, adjust)
            for stage, result in report["stages"].items():
                runs.append(
                    Run(
                        gpu=find_gpu(report["provenance"]["device"]).name,
                        stage=stage,
                        shape=shape,
                        micro_batch=config[stage]["micro_batch_size"],
                        tokens=config["data"]["sequence_length"],
                        tokens_per_second=result["tokens_per_second"],
                        peak_bytes=None,  # evaluations are in it
                        adjust=adjust,
                        source=f"benchmarks/results/{path.name}, {name}",
                        whole=True,
                    )
                )
    return runs


def throughput_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """For `throughput.json`."""
    return [
        {
            "gpu": run.gpu,
            "stage": run.stage,
            "model": run.shape.name,
            "hidden_size": run.shape.hidden,
            "micro_batch": run.micro_batch,
            "tokens": run.tokens,
            "tokens_per_second": round(run.tokens_per_second, 1),
            "tflop_s": round(run.tflop_s, 1),
            "utilisation": round(run.tflop_s / find_gpu(run.gpu).peak_tflop_s, 4),
            "source": run.source,
        }
        for run in runs
        if not run.whole
    ]


def planned_bytes(run: Run) -> float | None:
    """Peak memory that the plan expects; None for the frozen forward pass, which is no training."""
    step = Step(run.micro_batch, run.tokens)
    shape = run.shape
    if run.stage == "transfer":
        outside = shape.embedding + shape.head + shape.other
        return memory.transfer(shape, shape.layers, step, beside=outside).total
    if run.stage == "adjust":
        return memory.adjust(shape, step, run.adjust).total
    return None


def planned_tokens_per_second(run: Run, rows: Sequence[dict[str, Any]]) -> float:
    speed = rate(find_gpu(run.gpu), run.stage, run.shape.hidden, run.micro_batch * run.tokens, tuple(rows))
    return speed.tflop_s * 1e12 / run.flops_per_token


def markdown(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> str:
    """A table of every run: memory planned and measured; speed from the table with and without the model itself."""
    lines = [
        "| model | stage | micro-batch | GB measured | planned | deviation | tokens/s measured | planned | deviation"
        " | without this model's rows |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        peak = planned_bytes(run)
        cells = ["", "", ""]
        if peak is not None and run.peak_bytes is not None:
            cells = [f"{run.peak_bytes / GB:.2f}", f"{peak / GB:.2f}", f"{peak / run.peak_bytes - 1:+.1%}"]
        speed = planned_tokens_per_second(run, rows)
        others = [row for row in rows if row["model"] != run.shape.name]
        apart = "" if not others else f"{planned_tokens_per_second(run, others) / run.tokens_per_second - 1:+.0%}"
        cells += [f"{run.tokens_per_second:,.0f}", f"{speed:,.0f}", f"{speed / run.tokens_per_second - 1:+.1%}", apart]
        name = run.shape.name + (f" ({run.source.rpartition(', ')[2]}, whole run)" if run.whole else "")
        lines.append(f"| {name} | {run.stage} | {run.micro_batch} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
