"""Rows of one source as tokens, and as packed sequences: which template its format takes, and what comes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from lolcats.config import DataSection
from lolcats.data import multiple_choice, passkey, sources, templates
from lolcats.data.packed import PackedDataset
from lolcats.data.packing import TokenStream, pack, read_documents, tokenise
from lolcats.errors import UserError


def token_stream(
    config: DataSection,
    source: sources.OpenSource,
    rows: Any,
    first_row: int,
    tokenizer: Any,
    bar: Progress,
    max_tokens: int | None = None,
) -> tuple[TokenStream, str]:
    """Rows of one source as tokens, and their format.

    Args:
        first_row: number of the first of `rows` in the source, for messages.
        max_tokens: stop there.
    """
    columns = list(rows.column_names)
    form = sources.detect_format(source.source, columns)
    text_column = source.source.text_column or "text"
    template: templates.Template
    if form == "chat":
        template = templates.chat(tokenizer)
        needed = ["messages"] if "messages" in columns else ["instruction", "input", "output"]
    elif form == "alpaca":
        template = templates.alpaca
        needed = ["instruction", "input", "output"]
    elif form == "multiple_choice":
        rows = multiple_choice.few_shot(rows, source.source.seed)
        columns = list(rows.column_names)
        template = multiple_choice.template
        needed = columns
    elif form == "passkey":
        template = passkey.template(tokenizer, config.sequence_length - config.begin_token)
        needed = columns
    else:
        template = templates.plain_text(text_column)
        needed = [text_column, templates.CONTINUES]
    rows = rows.select_columns([column for column in needed if column in columns])
    name = source.source.path
    task = bar.add_task(f"tokenising {Path(name).name}", total=len(rows))
    documents = read_documents(
        rows, template, name=name, first_row=first_row, advance=lambda count: bar.advance(task, count)
    )
    loss_on = source.source.loss_on or config.loss_on
    stream = tokenise(documents, tokenizer, loss_on=loss_on, max_tokens=max_tokens)
    bar.update(task, completed=len(rows))
    return stream, form


def pack_rows(
    config: DataSection,
    source: sources.OpenSource,
    rows: Any,
    first_row: int,
    tokenizer: Any,
    bar: Progress,
    max_tokens: int | None = None,
    pad: bool = False,
) -> PackedDataset:
    """Template, tokenise and pack rows of one source; `info` holds its counts."""
    stream, form = token_stream(config, source, rows, first_row, tokenizer, bar, max_tokens)
    packed = pack(
        stream,
        config.sequence_length,
        reset_documents=config.reset_documents,
        begin_with=begin_token(tokenizer) if config.begin_token else None,
        pad_with=tokenizer.eos_token_id if pad else None,
    )
    return replace(packed, info={"path": source.source.path, "format": form} | packed.info)


def begin_token(tokenizer: Any) -> int:
    """Id of the tokenizer's begin token.

    Raises:
        UserError: it has none.
    """
    if tokenizer.bos_token_id is None:
        raise UserError("data.begin_token: the tokenizer has no begin token (bos_token); set data.begin_token=false")
    return tokenizer.bos_token_id
