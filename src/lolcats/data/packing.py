"""From documents to token streams to sequences of one length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.progress import Progress

from lolcats.config import DataSection, DataSource
from lolcats.data import sources, templates
from lolcats.data.packed import PackedDataset
from lolcats.data.retrieval import RetrievalWriter
from lolcats.data.templates import Document, SkippedRow
from lolcats.errors import UserError

T = TypeVar("T")
ROWS_PER_READ = 256
CHARACTERS_PER_CALL = 2_000_000  # bounds the tokenizer's memory, about 100 bytes per token


@dataclass
class TokenStream:
    """Documents one after another; S tokens in all."""

    token_ids: np.ndarray
    """[S] int32."""
    is_label: np.ndarray
    """[S] bool."""
    rows_read: int
    skipped: dict[str, int]
    """Rows without anything to learn, by reason."""


def read_documents(
    rows: Any, template: Callable[[dict[str, Any]], T], *, name: str, first_row: int, advance: Callable[[int], object]
) -> Generator[list[T | str]]:
    """What the template makes of every row, or why it is skipped, in batches of rows.

    rows: a `datasets.Dataset`; name, first_row: for messages; advance: called with the rows just used.
    """
    number = first_row
    for batch in rows.iter(batch_size=ROWS_PER_READ):
        documents: list[T | str] = []
        columns = list(batch)
        for values in zip(*batch.values(), strict=True):
            try:
                documents.append(template(dict(zip(columns, values, strict=True))))
            except SkippedRow as reason:
                documents.append(" ".join(str(reason).split())[:200])
            except UserError as error:
                raise UserError(f"{name}, row {number} (counted from 0): {error}") from error
            except (AttributeError, TypeError, KeyError) as error:
                raise UserError(f"{name}, row {number} (counted from 0) has another form: {error}") from error
            number += 1
        yield documents
        advance(len(documents))


def tokenise(
    batches: Iterable[list[list[Document] | str]], tokenizer: Any, *, loss_on: str, max_tokens: int | None = None
) -> TokenStream:
    """Tokenise documents, each segment by itself and without the tokenizer's own special tokens.

    batches: lists of rows, a row being a list of documents, or why it is skipped.
    loss_on: "answer" (labels where the template says) or "all".
    max_tokens: stop there. The result does not depend on how the rows are batched.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise UserError("the tokenizer has no end-of-sequence token: set its eos_token")
    pieces, labels = [np.zeros(0, np.int32)], [np.zeros(0, bool)]
    tokens = rows_read = 0
    skipped: Counter[str] = Counter()
    for rows in batches:
        rows_read += len(rows)
        skipped.update(row for row in rows if isinstance(row, str))
        for group in _by_size(chain.from_iterable(row for row in rows if not isinstance(row, str))):
            ids, is_label = _encode(group, tokenizer, eos)
            pieces.append(ids)
            labels.append(np.ones_like(is_label) if loss_on == "all" else is_label)
            tokens += len(ids)
        if max_tokens is not None and tokens >= max_tokens:
            break
    ids_S, is_label_S = (np.concatenate(parts)[:max_tokens] for parts in (pieces, labels))
    return TokenStream(ids_S, is_label_S, rows_read, skipped)


def pack(
    stream: TokenStream, sequence_length: int, *, begin_with: int | None = None, pad_with: int | None = None
) -> PackedDataset:
    """Cut a stream into sequences of `sequence_length` tokens; documents continue across the cuts.

    With `begin_with` each sequence is that token, which is never a label, and `sequence_length - 1` of the stream.
    The incomplete last sequence is dropped, or filled with the token `pad_with` (never a label). Sequences
    without a label are dropped. `info` counts both.
    """
    ids_S, is_label_S = stream.token_ids, stream.is_label
    body = sequence_length - (begin_with is not None)
    tail = len(ids_S) % body
    if pad_with is not None and tail:
        missing = body - tail
        ids_S = np.concatenate([ids_S, np.full(missing, pad_with, np.int32)])
        is_label_S = np.concatenate([is_label_S, np.zeros(missing, bool)])
        tail = 0
    count = len(ids_S) // body
    shape = (count, body)
    used = count * body
    ids_NT = ids_S[:used].reshape(shape)
    labels_NT = is_label_S[:used].reshape(shape).copy()
    if begin_with is not None:
        ids_NT = np.insert(ids_NT, 0, begin_with, axis=1)
        labels_NT = np.insert(labels_NT, 0, False, axis=1)
    labels_NT[:, 0] = False  # nothing precedes it
    kept_N = labels_NT.any(axis=1)
    counts = {
        "rows": stream.rows_read,
        "rows_skipped": sum(stream.skipped.values()),
        "skipped": dict(stream.skipped),
        "tokens_read": len(stream.token_ids),
        "tokens_dropped_at_end": tail,
        "sequences_dropped_without_label": int(count - kept_N.sum()),
        "sequences": int(kept_N.sum()),
    }
    if not kept_N.all():
        ids_NT, labels_NT = ids_NT[kept_N], labels_NT[kept_N]
    return PackedDataset(ids_NT, labels_NT, counts)


def _encode(documents: list[Document], tokenizer: Any, eos: int) -> tuple[np.ndarray, np.ndarray]:
    """token ids [S] int32, is label [S] bool."""
    texts = [text for document in documents for text, _ in document.segments]
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    encoded = tokenizer(texts, add_special_tokens=False, **options)["input_ids"]
    pieces: list[list[int]] = []
    flags: list[bool] = []
    place = 0
    for document in documents:
        pieces += encoded[place : place + len(document.segments)]
        place += len(document.segments)
        flags += [label for _, label in document.segments]
        if document.append_eos:
            pieces.append([eos])
            flags.append(True)
    sizes = [len(piece) for piece in pieces]
    ids_S = np.fromiter(chain.from_iterable(pieces), dtype=np.int32, count=sum(sizes))
    return ids_S, np.repeat(np.array(flags, dtype=bool), sizes)


def _by_size(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Groups of documents of at most CHARACTERS_PER_CALL characters, or of one document."""
    group: list[Document] = []
    characters = 0
    for document in documents:
        size = sum(len(text) for text, _ in document.segments)
        if group and characters + size > CHARACTERS_PER_CALL:
            yield group
            group, characters = [], 0
        group.append(document)
        characters += size
    if group:
        yield group


def retrieval_stream(
    config: DataSection, source: DataSource, indices: Sequence[int], tokenizer: Any, bar: Progress
) -> TokenStream:
    """Generated texts, each of which fills one packed sequence."""
    writer = RetrievalWriter(tokenizer, "train", source.haystack)
    length = config.sequence_length - config.begin_token
    write = partial(writer.write, "passkey") if source.path == "passkey" else writer.write_any
    numbered = bar.track(indices, description=f"writing {source.path} texts")
    samples = [write(length, source.seed, index) for index in numbered]
    all_labels = (source.loss_on or config.loss_on) == "all"
    return TokenStream(
        np.concatenate([sample.token_ids for sample in samples]),
        np.concatenate([all_labels | (sample.answer >= 0) for sample in samples]),
        rows_read=len(samples),
        skipped={},
    )


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
    """Template, tokenise and pack rows of one source; `info` holds its counts.

    Args:
        first_row: number of the first of `rows` in the source, for messages.
        max_tokens: stop there.
        pad: fill the last sequence up.
    """
    given, name = source.source, source.source.path
    form = sources.detect_format(given, list(rows.column_names))
    if form in sources.GENERATED:
        stream = retrieval_stream(config, given, rows["index"], tokenizer, bar)
    else:
        column, only = given.text_column or "text", given.format != "auto" or given.text_column is not None
        template = templates.records(form, tokenizer, column, only)
        used = {column, templates.CONTINUES, *(() if form == "text" and only else templates.COLUMNS)}
        rows = rows.select_columns([column for column in rows.column_names if column in used])
        task = bar.add_task(f"tokenising {Path(name).name}", total=len(rows))
        documents = read_documents(
            rows, template, name=name, first_row=first_row, advance=lambda count: bar.advance(task, count)
        )
        stream = tokenise(documents, tokenizer, loss_on=given.loss_on or config.loss_on, max_tokens=max_tokens)
        bar.update(task, completed=len(rows))
    begin, end = tokenizer.bos_token_id if config.begin_token else None, tokenizer.eos_token_id if pad else None
    if config.begin_token and begin is None:
        raise UserError("data.begin_token: the tokenizer has no begin token (bos_token); set data.begin_token=false")
    packed = pack(stream, config.sequence_length, begin_with=begin, pad_with=end)
    return replace(packed, info={"path": name, "format": form} | packed.info)
