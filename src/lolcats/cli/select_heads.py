"""`lolcats select-heads`: what exact heads a budget buys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lolcats.report import table


def select_heads(
    folder: Annotated[Path, typer.Argument(help="Output folder of `lolcats linearize --exact 12%` (any budget).")],
    budget: Annotated[str | None, typer.Option(help="12% or 24MiB@8192; without, the run's own.")] = None,
) -> None:
    """Show the gates of the KV heads, the heads that a budget makes exact, and the memory that more or fewer take.

    Nothing is changed. A model with other heads comes from `lolcats linearize --exact BUDGET --transfer-from FOLDER`,
    with the same settings otherwise.

    Examples:

      lolcats select-heads out/ --budget 24MiB@8192
    """
    from lolcats.modeling.cache_size import REPORTED_TOKENS
    from lolcats.training.head_gates import heads_picture
    from lolcats.training.head_gates import select_heads as select

    gates, chosen, sizes = select(folder, budget)
    out = Console()
    out.print(heads_picture(gates, chosen))
    every, own = sizes[-1][0], sum(map(len, chosen.values()))
    rows = [
        [f"{count}{'*' if count == own else ''}", f"{count / every:.0%}", f"{size / 2**20:.1f}"]
        for count, size in sizes
    ]
    columns = ["exact KV heads", "share", f"MiB at {REPORTED_TOKENS} tokens"]
    out.print(table("exact heads; * the budget's", columns, rows))
    names = [f"{index}.{head}" for index, heads in chosen.items() for head in heads]
    out.print(f"--exact {','.join(names)}", highlight=False, soft_wrap=True)
