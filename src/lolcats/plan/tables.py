"""A plan as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from lolcats.plan.costs import Memory
from lolcats.plan.gpus import GB, confidence
from lolcats.plan.shape import ModelShape
from lolcats.plan.ways import Recommendation, Request, Way, enough_gpus


def print_plan(
    shape: ModelShape, request: Request, ways: Sequence[Way], advice: Recommendation | None, console: Console
) -> None:
    kept = len(shape.layers) - len(shape.linear_layers)
    layers = f"{len(shape.layers)} layers" + (f", {kept} of them keep softmax" if kept else "")
    console.print(
        f"[bold]{shape.name}[/]: {_count(shape.parameters)} parameters, {layers}, hidden size {shape.hidden}\n"
        f"{request.gpus} x {request.gpu.name} of {request.memory_bytes / GB:g} GB; {_count(request.tokens)} tokens,"
        f" {request.epochs:g} epoch(s) a stage, sequences of {request.sequence_length}, batches of"
        f" {request.batch_size}",
        highlight=False,
    )
    console.print(_costs(ways))
    console.print(_memory(ways))
    for way in ways:
        if way.missing is not None:
            console.print(f"{way.name}: {way.missing}", highlight=False)
    taken = advice.ways if advice else ways
    step_tokens = min((way.micro_batch_size for way in taken), default=1) * request.sequence_length
    console.print(confidence(request.gpu, shape.hidden, step_tokens), highlight=False)
    planned = {way.stage for way in ways}
    for stage, number in (("transfer", 1), ("adjust", 2)):
        if stage in planned - {way.stage for way in (advice.ways if advice else ())}:
            remedy = enough_gpus(shape, request, stage)
            instead = f"; sharded it would with {remedy}" if remedy else ""
            console.print(f"[bold red]Stage {number} does not fit[/]{instead}", highlight=False)
    if advice is not None:
        stages = " + ".join(f"{way.name} {way.hours:.2f} h" for way in advice.ways)
        console.print(f"[bold]Recommended[/]: {stages}", highlight=False)
        for command in advice.commands:
            console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


def as_json(shape: ModelShape, request: Request, ways: Sequence[Way], advice: Recommendation | None) -> dict[str, Any]:
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
        "plans": [way.as_dict() for way in ways],
        "commands": list(advice.commands) if advice else [],
        "hours": advice.hours if advice else None,
    }


def _costs(ways: Sequence[Way]) -> Table:
    table = Table(title="Ways to train")
    for column in ("mode", "options", "fits"):
        table.add_column(column)
    for column in ("GPUs", "micro-batch", "layers x blocks", "trained", "PFLOP", "hours", "disk GB", "host GB"):
        table.add_column(column, justify="right")
    for way in ways:
        table.add_row(
            way.mode,
            ", ".join(way.options),
            "[green]yes[/]" if way.missing is None else "[red]no[/]",
            str(way.gpus),
            str(way.micro_batch_size),
            "" if way.block_layers is None else f"{way.block_layers} x {way.blocks}",
            _count(way.trained),
            f"{way.flops / 1e15:,.0f}",
            f"{way.hours:.2f}",
            _gb(way.disk),
            _gb(way.host),
        )
    return table


def _memory(ways: Sequence[Way]) -> Table:
    table = Table(title="GB on each GPU (of 10^9 bytes)")
    table.add_column("mode")
    parts = [part.name for part in fields(Memory)]
    for column in (*parts, "peak"):
        table.add_column(column, justify="right")
    for way in ways:
        table.add_row(way.name, *(_gb(getattr(way.memory, part)) for part in parts), _gb(way.memory.peak))
    return table


def _gb(number: float) -> str:
    if number == 0:
        return ""
    return f"{number / GB:,.2f}" if number < 100 * GB else f"{number / GB:,.0f}"


def _count(number: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:g}"
