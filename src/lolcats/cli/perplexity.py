"""`lolcats perplexity`: how well models predict a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lolcats.cli.console import notes, progress
from lolcats.cli.options import (
    DATA_OPTIONS,
    ModelLoader,
    Sources,
    check_writable,
    config_options,
    data_section,
    model_options,
)
from lolcats.errors import UserError
from lolcats.report import table, without_paths, write_text


@model_options
@config_options(*DATA_OPTIONS)
def perplexity(
    models: Annotated[list[str], typer.Argument(help="Folders or hub ids: linearized models or any others.")],
    data: Sources = None,
    max_sequences: Annotated[int | None, typer.Option(min=1, help="Use this many sequences only.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per forward pass.")] = 8,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Read whole documents instead of packed sequences, in windows of at most this many tokens."
        ),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Whole documents: tokens from window to window (default: --max-length).")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Whole documents: read this many of each source.")
    ] = None,
    join: Annotated[bool, typer.Option("--join", help="Whole documents: read all of a source as one text.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the results to this .json file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list on stdout instead of a table.")] = False,
    *,
    load: ModelLoader,
    given: dict[str, Any],
) -> None:
    """Measure perplexity on held-out data.

    Examples:

      lolcats perplexity out/ --data held_out.jsonl

      lolcats perplexity out/ HuggingFaceTB/SmolLM2-135M-Instruct --data held_out.jsonl --json

      lolcats perplexity out/ --data books.jsonl --max-length 65536 --output curve.json
    """
    if max_length is None and (join or any(option is not None for option in (stride, max_tokens))):
        raise UserError("--stride, --max-tokens and --join are for whole documents; give --max-length too")
    check_writable(output)
    section = data_section(data, given, validation_sequences=max_sequences)
    from lolcats.data import build_evaluation_dataset
    from lolcats.data.build import evaluation_documents
    from lolcats.data.packing import begin_token
    from lolcats.evaluation import perplexity as evaluation
    from lolcats.evaluation.load import attention_of, training_length, with_begin_token

    results = []
    for path in models:
        loaded, tokenizer = load(path)
        data_of_model = with_begin_token(section, path, tokenizer)
        if max_length is None:
            with notes().status(f"perplexity of {path}"):
                packed = build_evaluation_dataset(data_of_model, tokenizer)
                found = evaluation.dataset_perplexity(loaded, packed, batch_size=batch_size)
        else:
            documents = evaluation_documents(data_of_model, tokenizer, max_tokens=max_tokens, join=join)
            with progress() as bar:
                found = evaluation.document_perplexity(
                    loaded,
                    documents,
                    max_length=max_length,
                    stride=stride,
                    batch_size=batch_size,
                    training_length=training_length(path),
                    begin_with=begin_token(tokenizer) if data_of_model.begin_token else None,
                    on_progress=bar(f"tokens by {path}"),
                )
        results.append({"model": path, **found, "begin_token": data_of_model.begin_token, **attention_of(loaded)})
        del loaded
    if output is not None:
        write_text(output, json.dumps(without_paths(results), indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    out = Console()
    rows = [[row["model"], f"{row['perplexity']:.3f}", f"{row['loss']:.4f}", f"{row['tokens']:,}"] for row in results]
    out.print(
        table(f"perplexity on {', '.join(data or [])}", ["model", "perplexity", "loss (nats/token)", "tokens"], rows)
    )
    if max_length is not None:
        by_position = zip(*(row["positions"] for row in results), strict=False)
        rows = [
            [f"{place[0]['start']:,} to {place[0]['end'] - 1:,}", *(f"{entry['perplexity']:.3f}" for entry in place)]
            for place in by_position
        ]
        out.print(table("perplexity by position in the window", ["tokens before", *models], rows))
