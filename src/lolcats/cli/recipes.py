"""`lolcats recipes`: the recipes that come with the package."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lolcats.recipes import list_recipes, recipe_path

recipes = typer.Typer(help="List the recipes, or show one.", invoke_without_command=True)


@recipes.callback()
def listing(ctx: typer.Context) -> None:
    """List the recipes that come with lolcats; `lolcats recipes show NAME` prints one."""
    if ctx.invoked_subcommand is not None:
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, description in list_recipes().items():
        table.add_row(name, description)
    Console().print(table)


@recipes.command()
def show(name: Annotated[str, typer.Argument(help="Name of a recipe.")]) -> None:
    """Print a recipe's file, comments included; edit a copy and pass it to --recipe."""
    typer.echo(recipe_path(name).read_text(encoding="utf-8"), nl=False)
