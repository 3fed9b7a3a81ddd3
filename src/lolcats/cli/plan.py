"""`lolcats plan`: what a linearization needs, before it is begun."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from lolcats.cli.options import Overrides, Recipe, Sources, config_options, flags, resolve_for_model
from lolcats.recipes import DEFAULT, load_recipe


@config_options()
def plan(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, folder, config.json, or a name such as llama3-70b.")
    ] = None,
    recipe: Recipe = None,
    gpus: Annotated[int | None, typer.Option(min=1, max=8, help="How many; without it one, or else 8.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(min=1, help="GB of a GPU; without it 24, 48, 80, 141.")] = None,
    contexts: Annotated[bool, typer.Option("--contexts", help="Caches of sequences by their length, instead.")] = False,
    overrides: Overrides = None,
    data: Sources = None,
    *,
    given: dict[str, Any],
) -> None:
    """Memory, hours and the command for linearizing MODEL, from its config.json and `lolcats linearize`'s options.

    Example: lolcats plan llama3-70b --gpus 8 --gpu-memory 80
    """
    from lolcats.plan import EPOCH_TOKENS, GB, GIB, GPUS, HUB_IDS, WEIGHT, caches, count, ways

    if model is not None and not Path(model).is_dir():
        model = str(Path(model).parent) if model.endswith("config.json") else HUB_IDS.get(model, model)
    sources = load_recipe(recipe or DEFAULT).get("data", {}).get("sources") or [{"path": "self"}]
    if not data and sources[0]["path"] == "self":  # which only a whole model writes
        data = ["yahma/alpaca-cleaned"]
    options = {"--recipe": [recipe] if recipe else [], "--data": data or [], "--set": overrides or []}
    words = [*([model] if model else []), *flags(given)]
    words += [word for option, values in options.items() for value in values for word in (option, value)]
    arguments: Any = {"model": model, "data": data, "recipe": recipe, "overrides": overrides}
    config = resolve_for_model(given, known=HUB_IDS.values(), **arguments)
    shape = count(config)
    typer.echo(f"{config.model.path}\n{shape.parameters / 1e9:.2f} billion parameters, recipe {config.recipe}")
    if contexts:
        free = (gpu_memory or 80) * GB - shape.parameters * WEIGHT
        typer.echo(f"MiB of a sequence's cache, and sequences next to the weights on a GPU of {gpu_memory or 80:g} GB")
        typer.echo(f"{'tokens':>8}{'softmax bf16':>22}{'softmax FP8':>22}{'this configuration':>22}")
        for tokens in (2**power for power in range(10, 18)):
            sizes = caches(shape, tokens)
            typer.echo(f"{tokens:8}" + "".join(f"{n / 2**20:14,.1f}{max(0, free // n):8,.0f}" for n in sizes))
        return
    epoch = (config.data.max_train_tokens or EPOCH_TOKENS) / 1e6
    typer.echo(f"GiB on a GPU and hours of each stage, {epoch:g}M tokens an epoch (--max-tokens)")
    typer.echo(f"{'':32}{'stage 1':>14}{'gates':>14}{'stage 2':>14} fits")
    for memory in [gpu_memory] if gpu_memory else GPUS:
        command: list[str] = []
        for name, processes, changes, costs in ways(shape, config, memory, gpus):
            fits = all(peak <= memory * GB for peak, _ in costs.values())
            cells = {stage: f"{peak / GIB:7.1f}{seconds / 3600:7.2f}" for stage, (peak, seconds) in costs.items()}
            row = "".join(cells.get(stage, " " * 14) for stage in ("transfer", "gates", "adjust"))
            typer.echo(f"{memory:3g} GB {name:25}{row} {'yes' if fits else 'no'}")
            if fits and not command:
                sets = [f"--set {field}={str(value).lower()}" for field, value in changes.items()]
                torchrun = [f"torchrun --nproc-per-node {processes} -m"] if processes > 1 else []
                command = [*torchrun, "lolcats linearize", *map(shlex.quote, words), *sets, "-o out/"]
        lines = [" "] if command else ["  none fits; try more --gpus, or --no-adjust for stage 1 alone"]
        for word in command:
            lines += ["   "] if len(lines[-1] + word) > 76 else []
            lines[-1] += f" {word}"
        typer.echo(" \\\n".join(lines) + "\n")
