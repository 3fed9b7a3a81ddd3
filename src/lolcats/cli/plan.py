"""`lolcats plan`: what a linearization needs, before it is begun."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from lolcats.cli.options import ATTENTION_OPTIONS, Overrides, chosen, config_options, with_given
from lolcats.config import LinearizeConfig
from lolcats.errors import UserError
from lolcats.recipes import DEFAULT, load_recipe

_NOT_PLANNED = (
    *("enabled", "method", "softmax_control", "epochs", "max_steps"),
    *("batch_size", "micro_batch_size", "gradient_checkpointing"),
)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


@config_options(*ATTENTION_OPTIONS, "lora_rank", "distill", "train_feature_maps")
def plan(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or a shape such as llama3-70b; no weights are read.")],
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="How many.")] = 1,
    gpu: Annotated[str, typer.Option("--gpu", help="h200, h100, a100, b200, l40s, rtx4090, ...")] = "h200",
    tokens: Annotated[str, typer.Option("--tokens", help="Training tokens of one epoch, such as 20M.")] = "20M",
    epochs: Annotated[float, typer.Option("--epochs", min=0.0, help="Passes over them, in each stage.")] = 1.0,
    sequence_length: Annotated[int, typer.Option("--sequence-length", min=2)] = 1024,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Sequences of an update, over all GPUs.")] = 8,
    micro_batch_size: Annotated[
        int | None,
        typer.Option("--micro-batch-size", min=1, help="Per GPU; without it the most that fit.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    block_layers: Annotated[
        int | None,
        typer.Option("--block-layers", min=1, help="Layers of a block; without it the best.", show_default=False),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            help="Only these, of joint, sharded, streaming, jobs, pipelined, lora, lora-sharded.",
            show_default=False,
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option("--gpu-memory", min=0.1, help="GB of one GPU, in place of its kind's.", show_default=False),
    ] = None,
    disk: Annotated[
        float | None, typer.Option("--disk", min=0.0, help="GB free for hidden states.", show_default=False)
    ] = None,
    disk_speed: Annotated[float, typer.Option("--disk-speed", min=0.01, help="GB/s, reading and writing.")] = 2.0,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="GPUs of one machine.")] = 8,
    network: Annotated[float, typer.Option("--network", min=0.01, help="GB/s a GPU between machines.")] = 50.0,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Also write everything planned to this file.", show_default=False)
    ] = None,
    *,
    given: dict[str, Any],
) -> None:
    """Memory, disk, hours and the best command for linearizing MODEL on given GPUs, from its configuration alone.

    Examples:

      lolcats plan llama3-70b --gpus 8 --gpu h100

      lolcats plan meta-llama/Llama-3.1-405B --gpus 14 --gpu h100 --mode jobs --block-layers 9 --disk 20000
    """
    from rich.console import Console

    from lolcats.plan import tables
    from lolcats.plan.gpus import find_gpu
    from lolcats.plan.shape import model_shape
    from lolcats.plan.ways import MODES, Request, all_ways, recommend

    config = planned_config(given, overrides or [])
    wanted = chosen("mode", mode, tuple(MODES)) or tuple(MODES)
    request = Request(
        find_gpu(gpu),
        gpus=gpus,
        tokens=parse_tokens(tokens),
        epochs=epochs,
        sequence_length=sequence_length,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        adjust=config.adjust,
        settings=told(config),
        block_layers=block_layers,
        memory_gb=gpu_memory or 0.0,
        disk_gb=disk,
        disk_gb_s=disk_speed,
        gpus_per_node=gpus_per_node,
        network_gb_s=network,
    )
    shape = model_shape(model, config.attention, config.adjust)
    ways = [way for way in all_ways(shape, request) if way.mode in wanted]
    advice = recommend(model, ways, request)
    tables.print_plan(shape, request, ways, advice, Console())
    if as_json is not None:
        try:
            as_json.parent.mkdir(parents=True, exist_ok=True)
            as_json.write_text(json.dumps(tables.as_json(shape, request, ways, advice), indent=1) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {as_json}: {error.strerror}") from error


def planned_config(given: dict[str, Any], overrides: Iterable[str]) -> LinearizeConfig:
    """What the plan is told of a run's configuration.

    Args:
        given: values by option.
        overrides: values of --set.

    Raises:
        UserError: a value that is not valid, or a field that the plan does not know or decides itself.
    """
    for text in overrides:
        section, _, key = text.partition("=")[0].strip().partition(".")
        if section not in ("attention", "adjust") or key in _NOT_PLANNED:
            raise UserError(
                f"--set {text}: the plan takes fields of attention and adjust, of the latter not"
                f" {', '.join(_NOT_PLANNED)}; see the other options of lolcats plan"
            )
    return LinearizeConfig.from_dict(with_given(_default(), given, overrides))


def told(config: LinearizeConfig) -> tuple[str, ...]:
    """`section.key=value` of all that `linearize` would not do by itself, without the rank, which has an option."""
    default, ours = (
        found.model_dump(mode="json", include={"attention", "adjust"})
        for found in (LinearizeConfig.from_dict(_default()), config)
    )
    fields = {
        f"{section}.{key}": value
        for section, values in ours.items()
        for key, value in values.items()
        if value != default[section][key]
    }
    plain = {field: value if isinstance(value, str) else json.dumps(value) for field, value in fields.items()}
    return tuple(f"{field}={text}" for field, text in plain.items() if field != "adjust.lora_rank")


def _default() -> dict[str, Any]:
    """attention and adjust of the recipe that `linearize` starts from, without what the plan decides itself."""
    recipe = load_recipe(DEFAULT)
    return {
        section: {key: value for key, value in recipe[section].items() if key not in _NOT_PLANNED}
        for section in ("attention", "adjust")
    }


def parse_tokens(text: str) -> int:
    """`"20M"` -> 20000000; k, M, B as in thousand, million, billion."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbg]?)", text.strip().replace("_", "").replace(",", "").lower())
    if match is None or float(match[1]) == 0:
        raise UserError(f"--tokens {text}: expected a number such as 20M, 500k or 20000000")
    return round(float(match[1]) * _UNITS[match[2]])
