"""`lolcats sweep`: many runs from one file, and their table."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lolcats.cli.console import catalogue, notes
from lolcats.cli.options import Overrides, Sources, parse_source
from lolcats.errors import UserError
from lolcats.sweep.spec import Evaluate, read_sweep
from lolcats.sweeps import list_sweeps, sweep_path


def sweep(
    file: Annotated[
        str | None, typer.Argument(help="A sweep file, or the name of one of the package's; omitted: list these.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the runs and tables.")] = None,
    model: Annotated[str | None, typer.Option(help="Hub id or folder, in place of the recipe's.")] = None,
    data: Sources = None,
    path: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="A path that the sweep file names.")
    ] = None,
    overrides: Overrides = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seeds in place of the file's; repeatable.")] = None,
    print_commands: Annotated[
        bool, typer.Option("--print", help="Print the commands, for a cluster's scheduler, and stop.")
    ] = False,
    drop_weights: Annotated[
        bool, typer.Option("--drop-weights", help="Delete each run's weights once its numbers are recorded.")
    ] = False,
    workers: Annotated[
        int, typer.Option(min=1, help="Runs at the same time, each in its own process; on GPUs, one GPU for each.")
    ] = 1,
    tasks: Annotated[str | None, typer.Option(help="Evaluate every model too, as `lolcats eval --tasks` does.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder with the tasks' records instead of the hub.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first questions of each task.")] = None,
) -> None:
    """Run every combination of a sweep file's axes and seeds, and make a table of means and deviations.

    Finished runs are skipped, so the same command resumes a sweep. Runs are plain commands: `--print` writes one line
    a run; a line with `--transfer-from` needs the one that it names first.

    Examples:

      lolcats sweep components --data alpaca.jsonl -o sweeps/components

      lolcats sweep main --workers 4 --tasks paper --data-dir data/ -o sweeps/main

      lolcats sweep my-sweep.yaml --set adjust.max_steps=500 --print -o out/
    """
    if file is None:
        Console().print(catalogue(list_sweeps()))
        return
    paths = dict(_pair(text) for text in path or [])
    sources = [parse_source(text) for text in data] if data else None
    found, runs = read_sweep(
        sweep_path(file),
        model=model,
        data=sources,
        paths=paths,
        overrides=overrides or [],
        seeds=seed or None,
        evaluate=None if tasks is None else Evaluate(tasks=tasks, data_dir=data_dir, limit=limit),
    )
    if output is None:
        raise UserError("no output folder: give --output (-o), for example -o sweeps/components")
    from lolcats.sweep.runner import planned, run_sweep

    if print_commands:
        for commands in planned(found, runs, output).values():
            typer.echo(" && ".join(shlex.join(words) for words in commands))
        return
    rows = run_sweep(found, runs, output, workers=workers, drop_weights=drop_weights, console=notes())
    if any(row["status"] == "failed" for row in rows):
        raise typer.Exit(1)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name and value):
        raise UserError(f"--path {text}: expected NAME=PATH, for example textbooks=books.jsonl")
    return name, value
