"""`lolcats plan`: what a linearization needs, before it is begun."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lolcats.cli.console import table
from lolcats.cli.options import ATTENTION_OPTIONS, Overrides, assignments, config_options, with_given
from lolcats.config import LinearizeConfig
from lolcats.errors import UserError
from lolcats.recipes import DEFAULT, load_recipe

if TYPE_CHECKING:
    from lolcats.plan.shape import ModelShape
    from lolcats.plan.side_by_side import Arm
    from lolcats.plan.ways import Request, Way

_DECIDED = ("enabled", "epochs", "micro_batch_size", "gradient_checkpointing")
_NOT_PLANNED = {
    "attention": (),
    "gates": _DECIDED,
    "adjust": (*_DECIDED, "method", "softmax_control", "max_steps", "batch_size"),
}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


@config_options(*ATTENTION_OPTIONS, "lora_rank", "distill", "train_feature_maps")
def plan(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or a shape such as llama3-70b; no weights are read.")],
    gpus: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    gpu: Annotated[str, typer.Option(help="h200, h100, a100, b200, l40s, rtx4090, ...")] = "h200",
    tokens: Annotated[str, typer.Option(help="Training tokens of one epoch, such as 20M.")] = "20M",
    epochs: Annotated[float, typer.Option(min=0.0, help="Passes over them, in each stage.")] = 1.0,
    sequence_length: Annotated[int, typer.Option(min=2)] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of an update, over all GPUs.")] = 8,
    micro_batch_size: Annotated[int | None, typer.Option(min=1, help="Per GPU; without it the most that fit.")] = None,
    overrides: Overrides = None,
    block_layers: Annotated[int | None, typer.Option(min=1, help="Layers of a block; without it the best.")] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            help="Only these, of joint, sharded, streaming, jobs, gates, gates-sharded, lora, lora-sharded.",
        ),
    ] = None,
    contexts: Annotated[str, typer.Option(help="Tokens of a sequence, for what it costs in use.")] = "8192",
    gpu_memory: Annotated[float | None, typer.Option(min=0.1, help="GB of one GPU, in place of its kind's.")] = None,
    disk: Annotated[float | None, typer.Option(min=0.0, help="GB free for hidden states.")] = None,
    disk_speed: Annotated[float, typer.Option(min=0.01, help="GB/s, reading and writing.")] = 2.0,
    as_json: Annotated[Path | None, typer.Option("--json", help="Also write everything planned to this file.")] = None,
    *,
    given: dict[str, Any],
) -> None:
    """Memory, disk, hours and the best command for linearizing MODEL on given GPUs, from its configuration alone.

    Examples:

      lolcats plan llama3-70b --gpus 8 --gpu h100

      lolcats plan meta-llama/Llama-3.1-405B --gpus 14 --gpu h100 --mode jobs --block-layers 9 --disk 20000
    """
    from lolcats.plan.gpus import find_gpu
    from lolcats.plan.shape import model_shape
    from lolcats.plan.side_by_side import side_by_side
    from lolcats.plan.ways import MODES, Request, all_ways, commands, recommend

    wanted = [name.strip() for name in mode.split(",")] if mode else list(MODES)
    if unknown := sorted(set(wanted) - set(MODES)):
        raise UserError(f"--mode: there is no {unknown[0]!r}; choose of {', '.join(MODES)}")
    config = _planned(given, overrides or [])
    request = Request(
        find_gpu(gpu),
        gpus=gpus,
        tokens=parse_tokens(tokens),
        epochs=epochs,
        sequence_length=sequence_length,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        adjust=config.adjust,
        gates=config.gates,
        settings=(*assignments(given), *(overrides or [])),
        block_layers=block_layers,
        memory_gb=gpu_memory or 0.0,
        disk_gb=disk,
        disk_gb_s=disk_speed,
    )
    shape = model_shape(model, config.attention, config.adjust)
    ways = [way for way in all_ways(shape, request) if way.mode in wanted]
    advice = recommend(ways)
    arms = side_by_side(shape, request, [parse_tokens(text, "--contexts") for text in contexts.split(",")])
    _print(shape, request, ways, advice, arms)
    lines = commands(model, advice, request)
    for line in lines:
        typer.echo(f"  {line}")
    if as_json is not None:
        sections = {"adjust": request.adjust, "gates": request.gates}
        counts = {"parameters": shape.parameters, "feature_parameters": shape.feature_parameters}
        report = {
            "model": {name: value for name, value in asdict(shape).items() if name != "config"} | counts,
            "request": asdict(request)
            | {name: section.model_dump(mode="json", exclude_defaults=True) for name, section in sections.items()},
            "plans": [asdict(way) | {"hours": way.hours, "peak": way.memory.peak} for way in ways],
            "attention": [asdict(arm) for arm in arms],
            "commands": lines,
            "hours": sum(way.hours for way in advice),
        }
        try:
            as_json.parent.mkdir(parents=True, exist_ok=True)
            as_json.write_text(json.dumps(report, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {as_json}: {error.strerror}") from error


def _planned(given: dict[str, Any], overrides: list[str]) -> LinearizeConfig:
    """Attention, gates and stage 2 of the recipe that `linearize` starts from, with what the plan was told.

    Raises:
        UserError: a value that is not valid, or a field that the plan does not know or decides itself.
    """
    for text in overrides:
        section, _, key = text.partition("=")[0].strip().partition(".")
        if key in _NOT_PLANNED.get(section, (key,)):
            decided = "; ".join(f"of {name} not {', '.join(keys)}" for name, keys in _NOT_PLANNED.items() if keys)
            raise UserError(
                f"--set {text}: the plan takes fields of {', '.join(_NOT_PLANNED)}, {decided}; see the other options of"
                " lolcats plan"
            )
    recipe = load_recipe(DEFAULT)
    values = {
        section: {key: value for key, value in recipe.get(section, {}).items() if key not in decided}
        for section, decided in _NOT_PLANNED.items()
    }
    return LinearizeConfig.from_dict(with_given(values, given, overrides))


def parse_tokens(text: str, option: str = "--tokens") -> int:
    """`"20M"` -> 20000000; k, M, B as in thousand, million, billion."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbg]?)", text.strip().replace("_", "").replace(",", "").lower())
    if match is None or float(match[1]) == 0:
        raise UserError(f"{option} {text}: expected a number such as 20M, 500k or 20000000")
    return round(float(match[1]) * _UNITS[match[2]])


def _print(
    shape: ModelShape, request: Request, ways: Sequence[Way], advice: Sequence[Way], arms: Sequence[Arm]
) -> None:
    from lolcats.plan.gpus import GB, confidence
    from lolcats.plan.ways import STAGES

    console = Console(highlight=False)
    kept = len(shape.layers) - len(shape.linear_layers)
    layers = f"{len(shape.layers)} layers" + (f", {kept} of them keep softmax" if kept else "")
    console.print(
        f"[bold]{shape.name}[/]: {_count(shape.parameters)} parameters, {layers}, hidden size {shape.hidden}\n"
        f"{request.gpus} x {request.gpu.name} of {request.memory_bytes / GB:g} GB; {_count(request.tokens)} tokens,"
        f" {request.epochs:g} epoch(s) a stage, sequences of {request.sequence_length}, batches of"
        f" {request.batch_size}"
    )
    columns = ["mode", "options", "fits", "GPUs", "micro-batch", "layers x blocks", "trained", "PFLOP", "hours"]
    costs = [
        [
            way.mode,
            ", ".join(way.options),
            "[green]yes[/]" if way.missing is None else "[red]no[/]",
            way.gpus,
            way.micro_batch_size,
            "" if way.block_layers is None else f"{way.block_layers} x {way.blocks}",
            _count(way.trained),
            f"{way.flops / 1e15:,.0f}",
            f"{way.hours:.2f}",
            _gb(way.disk),
            _gb(way.host),
        ]
        for way in ways
    ]
    console.print(table("Ways to train", [*columns, "disk GB", "host GB"], costs, names=3))
    memory = [vars(way.memory) | {"peak": way.memory.peak} for way in ways]
    rows = [[way.name, *map(_gb, parts.values())] for way, parts in zip(ways, memory, strict=True)]
    console.print(table("GB on each GPU (of 10^9 bytes)", ["mode", *memory[0]], rows))
    for way in ways:
        if way.missing is not None:
            console.print(f"{way.name}: {way.missing}")
    columns = ["attention", *(f"{STAGES[name]} PFLOP" for name in STAGES)]
    for tokens in arms[0].cache_bytes:
        columns += [f"MiB at {tokens:,} tokens", "sequences on a GPU", "TFLOP to read one"]
    rows = []
    for arm in arms:
        row = [
            arm.name,
            *(f"{arm.stage_flops[name] / 1e15:,.1f}" if name in arm.stage_flops else "" for name in STAGES),
        ]
        for tokens, size in arm.cache_bytes.items():
            row += [f"{size / 2**20:,.1f}", f"{arm.sequences[tokens]:,}", f"{arm.prefill_flops[tokens] / 1e12:,.1f}"]
        rows.append(row)
    console.print(table("Exact heads: training, and a sequence in use", columns, rows))
    sizes = [way.micro_batch_size for way in advice or ways if way.stage != "gates"]
    if sizes:
        console.print(confidence(request.gpu, shape.hidden, min(sizes) * request.sequence_length))
    cap = shape.config.attention.linear_length_cap
    if shape.chosen and 0 < cap < request.gates.sequence_length:
        console.print(
            f"Gates: gradients beyond the linear_length_cap of {cap} tokens have no kernel, so that they take several"
            " times as long and twice the memory (SmolLM2-135M, H200: 83 s and 9.7 GiB)."
        )
    for stage, title in STAGES.items():
        if stage in {way.stage for way in ways} - {way.stage for way in advice}:
            console.print(f"[bold red]{title.capitalize()}: does not fit[/]; try more --gpus")
    if advice:
        console.print("[bold]Recommended[/]: " + " + ".join(f"{way.name} {way.hours:.2f} h" for way in advice))


def _gb(size: float) -> str:
    """Bytes in GB, nothing for none."""
    if size == 0:
        return ""
    return f"{size / 1e9:,.2f}" if size < 1e11 else f"{size / 1e9:,.0f}"


def _count(number: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:g}"
