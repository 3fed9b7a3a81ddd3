"""A plan as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from lolcats.plan.gpus import GB
from lolcats.plan.memory import Memory
from lolcats.plan.recommend import Recommendation
from lolcats.plan.request import ModePlan, Request
from lolcats.plan.shape import ModelShape

PARTS = tuple(Memory.__dataclass_fields__)


def print_plan(
    shape: ModelShape,
    request: Request,
    plans: Sequence[ModePlan],
    recommendation: Recommendation | None,
    console: Console,
) -> None:
    console.print(_heading(shape, request), highlight=False)
    console.print(_costs(plans))
    console.print(_memory(plans))
    for plan in plans:
        if plan.missing is not None:
            console.print(f"{_name(plan)}: {plan.missing}", highlight=False)
    if plans and plans[0].rate.scaled:
        console.print(
            f"Hours are scaled from measurements on {plans[0].rate.measured_on} by the GPUs' peak rates.",
            highlight=False,
        )
    console.print(_advice(recommendation), highlight=False)
    for command in recommendation.commands if recommendation else ():
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


def as_json(
    shape: ModelShape, request: Request, plans: Sequence[ModePlan], recommendation: Recommendation | None
) -> dict[str, Any]:
    """Everything that was planned; bytes and seconds as plain numbers."""
    return {
        "model": {
            "name": shape.name,
            "parameters": shape.parameters,
            "layers": len(shape.layers),
            "linear_layers": len(shape.linear_layers),
            "hidden_size": shape.hidden,
            "feature_parameters": shape.feature_parameters,
            "lora_parameters": shape.lora_parameters(request.adjust.lora_rank),
        },
        "request": asdict(request) | {"adjust": request.adjust.model_dump(mode="json", exclude_defaults=True)},
        "plans": [plan.as_dict() for plan in plans],
        "commands": list(recommendation.commands) if recommendation else [],
        "hours": recommendation.hours if recommendation else None,
    }


def _heading(shape: ModelShape, request: Request) -> str:
    kept = len(shape.layers) - len(shape.linear_layers)
    layers = f"{len(shape.layers)} layers" + (f", {kept} of them keep softmax" if kept else "")
    return (
        f"[bold]{shape.name}[/]: {_count(shape.parameters)} parameters, {layers}, hidden size {shape.hidden}\n"
        f"{request.gpus} x {request.gpu.name} of {request.memory_bytes / GB:g} GB; {_count(request.tokens)} tokens,"
        f" {request.epochs:g} epoch(s) a stage, sequences of {request.sequence_length}, batches of"
        f" {request.batch_size}"
    )


def _costs(plans: Sequence[ModePlan]) -> Table:
    table = Table(title="Ways to train")
    for column in ("mode", "options", "fits"):
        table.add_column(column)
    for column in ("GPUs", "micro-batch", "layers x blocks", "trained", "PFLOP", "hours", "disk GB", "host GB"):
        table.add_column(column, justify="right")
    for plan in plans:
        table.add_row(
            plan.mode,
            ", ".join(plan.options),
            "[green]yes[/]" if plan.missing is None else "[red]no[/]",
            str(plan.gpus),
            str(plan.micro_batch_size),
            "" if plan.block_layers is None else f"{plan.block_layers} x {plan.blocks}",
            _count(plan.trained),
            f"{plan.flops / 1e15:,.0f}",
            f"{plan.hours:.2f}" + ("" if plan.limit == "compute" else f" ({plan.limit})"),
            _gb(plan.disk),
            _gb(plan.host),
        )
    return table


def _memory(plans: Sequence[ModePlan]) -> Table:
    table = Table(title="GB on each GPU (of 10^9 bytes)")
    table.add_column("mode")
    for column in (*PARTS, "evaluation", "sum"):
        table.add_column(column, justify="right")
    for plan in plans:
        parts = [_gb(getattr(plan.memory, part)) for part in PARTS]
        table.add_row(_name(plan), *parts, _gb(plan.evaluation), _gb(plan.needed))
    return table


def _advice(recommendation: Recommendation | None) -> str:
    if recommendation is None:
        return "[bold red]Nothing fits.[/]"
    stages = " + ".join(f"{_name(plan)} {plan.hours:.2f} h" for plan in recommendation.plans)
    planned = {plan.stage for plan in recommendation.plans}
    alone = {"transfer": "; stage 2 does not fit", "adjust": "; stage 1 does not fit"}
    return f"[bold]Recommended[/]: {stages}{alone[planned.pop()] if len(planned) == 1 else ''}"


def _name(plan: ModePlan) -> str:
    return ", ".join([plan.mode, *plan.options])


def _gb(number: float) -> str:
    if number == 0:
        return ""
    return f"{number / GB:,.2f}" if number < 100 * GB else f"{number / GB:,.0f}"


def _count(number: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:g}"
