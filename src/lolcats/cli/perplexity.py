"""`lolcats perplexity`: how well models predict a text."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from lolcats.cli.console import notes
from lolcats.cli.console import quiet_loading_bars
from lolcats.cli.options import data_section


def perplexity(
    models: Annotated[list[str], typer.Argument(help="Folders or hub ids: linearized models or any others.")],
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            metavar="PATH[,KEY=VALUE]...",
            help="Hub id, local json, jsonl(.gz), parquet or txt, or `demo`; repeatable; all rows are used.",
            show_default=False,
        ),
    ],
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens of a packed sequence.")] = 1024,
    loss_on: Annotated[str, typer.Option(help="answer (of instruction records) or all tokens.")] = "answer",
    max_sequences: Annotated[
        int | None, typer.Option(min=1, help="Use this many sequences only.", show_default=False)
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per forward pass.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list on stdout instead of a table.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    gguf_file: Annotated[
        str | None, typer.Option("--gguf-file", help="GGUF file inside MODEL.", show_default=False)
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with MODEL.")
    ] = False,
) -> None:
    """Measure perplexity on held-out data.

    Examples:

      lolcats perplexity out/ --data held_out.jsonl

      lolcats perplexity out/ HuggingFaceTB/SmolLM2-135M-Instruct --data held_out.jsonl --json
    """
    section = data_section(data, sequence_length=sequence_length, loss_on=loss_on, validation_sequences=max_sequences)
    quiet_loading_bars()
    from lolcats.evaluation import perplexity as evaluation
    from lolcats.evaluation.load import load_model

    console = notes()
    results = []
    for path in models:
        loaded, tokenizer = load_model(
            path, dtype=dtype, device=device, trust_remote_code=trust_remote_code, gguf_file=gguf_file
        )
        with console.status(f"perplexity of {path}"):
            results.append({"model": path, **evaluation.perplexity(loaded, tokenizer, section, batch_size=batch_size)})
        del loaded
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    table = Table(title=f"perplexity on {', '.join(data)}", title_justify="left")
    table.add_column("model")
    for column in ("perplexity", "loss (nats/token)", "tokens"):
        table.add_column(column, justify="right")
    for row in results:
        table.add_row(row["model"], f"{row['perplexity']:.3f}", f"{row['loss']:.4f}", f"{row['tokens']:,}")
    from rich.console import Console

    Console().print(table)
