"""`lolcats plan`: what a linearization needs, before it is begun."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lolcats.cli.options import Overrides, Recipe, Sources, config_options, resolve_for_model
from lolcats.recipes import DEFAULT, load_recipe


@config_options()
def plan(
    model: Annotated[str | None, typer.Argument(help="Hub id, folder, config.json; llama3-8b, -70b, -405b.")] = None,
    recipe: Recipe = None,
    gpus: Annotated[int | None, typer.Option(min=1, max=8, help="How many; without it one, or else 8.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(min=1, help="GB of a GPU; without it 24, 48, 80, 141.")] = None,
    overrides: Overrides = None,
    data: Sources = None,
    *,
    given: dict[str, Any],
) -> None:
    """Memory and hours of linearizing MODEL, from its config.json and `lolcats linearize`'s options, and the command.

    Example: lolcats plan llama3-70b --gpus 8 --gpu-memory 80
    """
    from torch import bfloat16

    from lolcats.modeling.cache_size import cache_sizes
    from lolcats.plan import EPOCH_TOKENS, GB, GIB, GPUS, HUB_IDS, count, ways

    if model is not None and not Path(model).is_dir():
        model = str(Path(model).parent) if model.endswith("config.json") else HUB_IDS.get(model, model)
    given_more = "  # and the options given here" if recipe or overrides or given or data else ""
    sources = load_recipe(recipe or DEFAULT).get("data", {}).get("sources") or [{"path": "self"}]
    if writes := not data and sources[0]["path"] == "self":  # its own data, which only a whole model can
        data = ["yahma/alpaca-cleaned"]
    arguments: Any = {"model": model, "data": data, "recipe": recipe, "overrides": overrides}
    config = resolve_for_model(given, known=HUB_IDS.values(), **arguments)
    shape = count(config)
    typer.echo(f"{config.model.path}\n{shape.parameters / 1e9:.2f} billion parameters, recipe {config.recipe}")
    positions = shape.config.get_text_config().max_position_embeddings
    lengths = [8, *(k for k in (32, 128) if 1024 * k <= positions)]
    sizes = [(k, *cache_sizes(shape.config, 1024 * k, bfloat16, shape.chosen)) for k in lengths]
    cells = ", ".join(f"{k}k tokens {own / 2**20:.0f} / {softmax / 2**20:.0f}" for k, own, softmax in sizes)
    typer.echo(f"MiB of a sequence's cache / of softmax attention's: {cells}")
    epoch = (config.data.max_train_tokens or EPOCH_TOKENS) / 1e6
    typer.echo(f"GiB on a GPU and hours of each stage, {epoch:g}M tokens an epoch (--max-tokens)")
    typer.echo(f"{'':32}{'stage 1':>14}{'gates':>14}{'stage 2':>14} fits")
    for memory in [gpu_memory] if gpu_memory else GPUS:
        command = ""
        for name, processes, changes, costs in ways(shape, config, memory, gpus):
            fits = all(peak <= memory * GB for peak, _ in costs.values())
            costs_of = {stage: f"{peak / GIB:7.1f}{seconds / 3600:7.2f}" for stage, (peak, seconds) in costs.items()}
            row = "".join(costs_of.get(stage, " " * 14) for stage in ("transfer", "gates", "adjust"))
            typer.echo(f"{memory:3g} GB {name:25}{row} {'yes' if fits else 'no'}")
            if fits and not command:
                start = f"torchrun --nproc-per-node {processes} -m lolcats" if processes > 1 else "lolcats"
                sets = "".join(f" --set {field}={str(value).lower()}" for field, value in changes.items())
                source = " --data DATA" * (writes and (processes > 1 or "transfer.block_mode" in changes))
                command = f"{start} linearize {config.model.path}{source} -o out/{sets}{given_more}"
        typer.echo(f"  {command or 'none fits; try more --gpus, or --no-adjust for stage 1 alone'}\n")
