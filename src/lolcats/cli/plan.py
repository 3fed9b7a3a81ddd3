"""`lolcats plan`: what a linearization needs, before it is begun."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from lolcats.cli.options import chosen
from lolcats.cli.options import parse_layers
from lolcats.config import AdjustSection
from lolcats.config import AttentionSection
from lolcats.errors import UserError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


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
    lora_rank: Annotated[int, typer.Option("--lora-rank", min=1)] = 8,
    share_state: Annotated[
        str, typer.Option("--share-state", help="One state per kv_head, or per query_head as in the paper.")
    ] = "kv_head",
    keep_softmax: Annotated[
        str | None,
        typer.Option("--keep-softmax", metavar="LAYERS", help="Layers that stay softmax: 0-15,20", show_default=False),
    ] = None,
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
) -> None:
    """Memory, disk, hours and the best command for linearizing MODEL on given GPUs, from its configuration alone.

    Examples:

      lolcats plan llama3-70b --gpus 8 --gpu h100

      lolcats plan meta-llama/Llama-3.1-405B --gpus 14 --gpu h100 --mode jobs --block-layers 9 --disk 20000
    """
    from rich.console import Console

    from lolcats.plan import tables
    from lolcats.plan.gpus import find_gpu
    from lolcats.plan.modes import MODES
    from lolcats.plan.modes import all_modes
    from lolcats.plan.recommend import recommend
    from lolcats.plan.request import Request
    from lolcats.plan.shape import model_shape

    wanted = chosen("mode", mode, tuple(MODES)) or tuple(MODES)
    request = Request(
        find_gpu(gpu),
        gpus=gpus,
        tokens=parse_tokens(tokens),
        epochs=epochs,
        sequence_length=sequence_length,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        lora_rank=lora_rank,
        block_layers=block_layers,
        memory_gb=gpu_memory or 0.0,
        disk_gb=disk,
        disk_gb_s=disk_speed,
        gpus_per_node=gpus_per_node,
        network_gb_s=network,
    )
    if share_state not in ("kv_head", "query_head"):
        raise UserError(f"--share-state {share_state}: expected kv_head or query_head")
    keep = parse_layers(keep_softmax) if keep_softmax else []
    attention = AttentionSection(keep_softmax=keep, share_state=share_state)
    shape = model_shape(model, attention, AdjustSection(lora_rank=lora_rank))
    plans = [found for found in all_modes(shape, request) if found.mode in wanted]
    advice = recommend(model, plans, request)
    tables.print_plan(shape, request, plans, advice, Console())
    if as_json is not None:
        try:
            as_json.parent.mkdir(parents=True, exist_ok=True)
            as_json.write_text(json.dumps(tables.as_json(shape, request, plans, advice), indent=1) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {as_json}: {error.strerror}") from error


def parse_tokens(text: str) -> int:
    """`"20M"` -> 20000000; k, M, B as in thousand, million, billion."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbg]?)", text.strip().replace("_", "").replace(",", "").lower())
    if match is None or float(match[1]) == 0:
        raise UserError(f"--tokens {text}: expected a number such as 20M, 500k or 20000000")
    return round(float(match[1]) * _UNITS[match[2]])
