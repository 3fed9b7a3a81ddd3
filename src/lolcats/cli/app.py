"""The commands, assembled."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lolcats.cli.blocks import blocks
from lolcats.cli.chat import chat
from lolcats.cli.console import Group, prepare_libraries
from lolcats.cli.eval import evaluate
from lolcats.cli.generate import generate
from lolcats.cli.import_published import import_published
from lolcats.cli.linearize import linearize
from lolcats.cli.plan import plan
from lolcats.cli.push import push
from lolcats.cli.report import report
from lolcats.cli.serve import serve
from lolcats.cli.sweep import sweep
from lolcats.recipes import list_recipes, show_recipe

# One string a paragraph: line breaks inside would show.
HELP = "\n\n".join(
    [
        "Turn a pretrained Transformer LLM into one with mostly linear attention.",
        "[bold]1. lolcats linearize[/] replaces attention, trains it to match, and writes a Hugging Face folder.",
        "[bold]2. lolcats generate, chat[/] and [bold]serve[/] run it: prompts, conversations, OpenAI's clients.",
        "[bold]3. lolcats eval[/] measures it beside the original: perplexity, recall, lm-eval's tasks.",
        "[bold]Example[/]",
        "  lolcats linearize HuggingFaceTB/SmolLM2-135M-Instruct -o out/",
        '  lolcats generate out/ --prompt "The capital of France is"',
        '[bold]In Python[/]: import lolcats; AutoModelForCausalLM.from_pretrained("out/"), as for any model.',
    ]
)

app = typer.Typer(
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(help=HELP)
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Let libraries print warnings.")] = False,
) -> None:
    prepare_libraries(quiet=not verbose)


recipes = typer.Typer(help="List the recipes, or show one.", invoke_without_command=True)


@recipes.callback()
def listing(ctx: typer.Context) -> None:
    """List the recipes that come with lolcats; `lolcats recipes show NAME` prints one."""
    if ctx.invoked_subcommand is None:
        names = Table.grid(padding=(0, 1))
        names.add_column(style="bold", no_wrap=True)
        for entry in list_recipes().items():
            names.add_row(*entry)
        Console().print(names)


@recipes.command()
def show(name: Annotated[str, typer.Argument(help="Name of a recipe.")]) -> None:
    """Print a recipe in full, and from what it is made; edit a copy and pass it to --recipe."""
    typer.echo(show_recipe(name), nl=False)


COMMANDS = (*(linearize, push, import_published, plan, generate, chat, serve), *(evaluate, report, sweep))
for command in COMMANDS:
    name = command.__name__.replace("_", "-")
    name = {"import-published": "import", "evaluate": "eval"}.get(name, name)
    app.command(name)(command)
app.add_typer(blocks, name="blocks")
app.add_typer(recipes, name="recipes")
