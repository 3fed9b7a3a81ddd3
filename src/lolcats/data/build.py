"""Training, validation and evaluation data from a data section: the package's main functions."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn
from rich.progress import MofNCompleteColumn
from rich.progress import Progress
from rich.progress import TextColumn
from rich.progress import TimeRemainingColumn

from lolcats.config import DataSection
from lolcats.data import cache
from lolcats.data import multiple_choice
from lolcats.data import passkey
from lolcats.data import sources
from lolcats.data import templates
from lolcats.data.mixture import choose
from lolcats.data.mixture import is_weighted
from lolcats.data.mixture import mixture_counts
from lolcats.data.packed import PackedDataset
from lolcats.data.packed import fingerprint
from lolcats.data.packing import TokenStream
from lolcats.data.packing import pack
from lolcats.data.packing import read_documents
from lolcats.data.packing import tokenise
from lolcats.errors import UserError


def build_datasets(
    config: DataSection,
    tokenizer: Any,
    *,
    seed: int,
    cache_dir: Path | None = None,
    progress: bool = True,
    model: Any = None,
) -> tuple[PackedDataset, PackedDataset]:
    """Training and validation split, from the cache if the same content was packed before.

    The first `validation_rows` rows of each source are its validation split, packed in the original order;
    the other rows are packed in theirs and mixed as `mixture_counts` says. `max_train_tokens` takes the
    first sequences of a single source, and a seeded choice in the same shares from several.

    cache_dir: default $LOLCATS_CACHE or ~/.cache/lolcats. Raises UserError for data that cannot be used.
    model: whose softmax attention `top_esl` is measured under; not needed without it.
    """
    opened = _open(config)
    if config.max_train_tokens is not None and config.max_train_tokens < config.sequence_length:
        raise UserError(
            f"data.max_train_tokens={config.max_train_tokens} is less than one sequence "
            f"(data.sequence_length={config.sequence_length}): raise it, or lower the length"
        )
    # The seed matters, and enters the cache's key, only where a choice of sequences is made.
    chosen = len(opened) > 1 and (
        is_weighted([source.weight for source in config.sources]) or config.max_train_tokens is not None
    )
    directory = _directory(config, opened, tokenizer, cache_dir, "training", seed if chosen else None)
    splits = cache.load(directory, ("train", "validation"))
    if splits is None:
        with _scratch(directory.parent) as scratch, _bar(progress) as bar:
            train, validation = _pack_all(config, opened, tokenizer, seed, scratch, bar)
        saved = cache.save(directory, {"train": train, "validation": validation})
        splits = (saved and cache.load(directory, ("train", "validation"))) or (train, validation)
    if config.top_esl is None:
        return splits[0], splits[1]
    return _keep_longest(config.top_esl, splits[0], model, cache.cache_directory(cache_dir), progress), splits[1]


def _keep_longest(count: int, data: PackedDataset, model: Any, folder: Path, progress: bool) -> PackedDataset:
    if model is None:
        raise UserError(f"data.top_esl={count} needs the model that the data is for; leave it out here")
    from lolcats.data import effective_length  # needs the models' code, which data otherwise does not

    with _bar(progress) as bar:
        task = bar.add_task("effective sequence lengths", total=len(data))
        lengths = effective_length.cached_lengths(
            data, model, folder, on_progress=lambda done, _: bar.update(task, completed=done)
        )
    return effective_length.keep_longest(data, lengths, count)


def build_evaluation_dataset(
    config: DataSection, tokenizer: Any, *, cache_dir: Path | None = None, progress: bool = True
) -> PackedDataset:
    """All rows of all sources in their order, as one split to measure perplexity on.

    Nothing is held out, weights and `max_train_tokens` do not apply, and the incomplete last sequence of
    each source is filled up (with tokens that are not labels) instead of dropped.
    """
    opened = _open(config)
    directory = _directory(config, opened, tokenizer, cache_dir, "evaluation", None)
    splits = cache.load(directory, ("evaluation",))
    if splits is None:
        parts = []
        with _scratch(directory.parent) as scratch, _bar(progress) as bar:
            for source in opened:
                rows = source.rows(scratch)
                parts.append(_pack_rows(config, source, rows, 0, tokenizer, bar, pad=True))
        data = _validation(config, parts)
        saved = cache.save(directory, {"evaluation": data})
        splits = (saved and cache.load(directory, ("evaluation",))) or (data,)
    return splits[0]


def evaluation_documents(
    config: DataSection, tokenizer: Any, *, max_tokens: int | None = None, join: bool = False, progress: bool = True
) -> list[tuple[np.ndarray, np.ndarray]]:
    """All rows of all sources as whole documents: (token ids [S] int32, is label [S] bool) of each.

    max_tokens: of each source; the last document is cut there.
    join: all rows of a source are one document, to get texts that are long enough.
    """
    documents: list[tuple[np.ndarray, np.ndarray]] = []
    with _scratch(cache.cache_directory(None)) as scratch, _bar(progress) as bar:
        for source in _open(config):
            stream = _token_stream(config, source, source.rows(scratch), 0, tokenizer, bar, max_tokens)[0]
            borders = np.zeros(0, np.int64) if join else np.flatnonzero(np.diff(stream.document_ids)) + 1
            parts = zip(np.split(stream.token_ids, borders), np.split(stream.is_label, borders), strict=True)
            documents += [(ids, labels) for ids, labels in parts if len(ids)]
    return documents


def _open(config: DataSection) -> list[sources.OpenSource]:
    if not config.sources:
        raise UserError("no data: give at least one source (--data), for example --data demo")
    return [sources.open_source(source) for source in config.sources]


def _directory(
    config: DataSection,
    opened: list[sources.OpenSource],
    tokenizer: Any,
    cache_dir: Path | None,
    kind: str,
    seed: int | None,
) -> Path:
    settings = config.model_dump(mode="json", exclude={"top_esl"})  # which is applied after packing
    for source in settings["sources"]:
        del source["path"]  # the content counts, not where it lies
    key = cache.content_hash(
        {
            "data_format": cache.DATA_FORMAT,
            "kind": kind,
            "config": settings,
            "content": [source.content_hash for source in opened],
            "tokenizer": cache.tokenizer_hash(tokenizer),
            "seed": seed,
        }
    )
    return cache.cache_directory(cache_dir) / f"packed-{key[:32]}"


def _pack_all(
    config: DataSection,
    opened: list[sources.OpenSource],
    tokenizer: Any,
    seed: int,
    scratch: Path,
    bar: Progress,
) -> tuple[PackedDataset, PackedDataset]:
    limit = None if config.max_train_tokens is None else config.max_train_tokens // config.sequence_length
    # One source needs no more tokens than are used; of several all are read, so that the choice is fair.
    max_tokens = limit * config.sequence_length if limit is not None and len(opened) == 1 else None
    held_out = config.validation_rows
    training_parts, validation_parts = [], []
    for source in opened:
        rows = source.rows(scratch)
        if len(rows) <= held_out:
            raise UserError(
                f"{source.source.path} has {len(rows)} rows, and the first {held_out} of each source are "
                f"the validation split, so none is left to train on: lower data.validation_rows"
            )
        first, rest = rows.select(range(held_out)), rows.select(range(held_out, len(rows)))
        validation_parts.append(_pack_rows(config, source, first, 0, tokenizer, bar))
        training_parts.append(_pack_rows(config, source, rest, held_out, tokenizer, bar, max_tokens))
        if len(training_parts[-1]) == 0:
            raise UserError(_nothing(config, source.source.path, training_parts[-1].info, "training"))
    counts = mixture_counts([len(part) for part in training_parts], [source.weight for source in config.sources], limit)
    picks = [
        choose(len(part), count, seed, place)
        for place, (part, count) in enumerate(zip(training_parts, counts, strict=True))
    ]
    training = _join(training_parts, picks)
    if len(training) == 0:
        raise UserError(
            "the weights leave no training sequence: make them less unequal, or give more of the source "
            "with the largest weight"
        )
    return training, _validation(config, validation_parts)


def _pack_rows(
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
    stream, form = _token_stream(config, source, rows, first_row, tokenizer, bar, max_tokens)
    packed = pack(
        stream,
        config.sequence_length,
        reset_documents=config.reset_documents,
        pad_with=tokenizer.eos_token_id if pad else None,
    )
    return replace(packed, info={"path": source.source.path, "format": form} | packed.info)


def _token_stream(
    config: DataSection,
    source: sources.OpenSource,
    rows: Any,
    first_row: int,
    tokenizer: Any,
    bar: Progress,
    max_tokens: int | None = None,
) -> tuple[TokenStream, str]:
    """Rows of one source as tokens, and their format."""
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
        template = passkey.template(tokenizer, config.sequence_length)
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


def _validation(config: DataSection, parts: list[PackedDataset]) -> PackedDataset:
    """The first sequences of each source: all, or `validation_sequences` in the sources' proportions."""
    available = [len(part) for part in parts]
    counts = mixture_counts(available, [1.0] * len(parts), config.validation_sequences)
    data = _join(parts, [np.arange(count) for count in counts])
    if len(data) == 0:
        part = parts[0].info
        raise UserError(_nothing(config, part["path"], part, "validation"))
    return data


def _join(parts: list[PackedDataset], picks: list[np.ndarray]) -> PackedDataset:
    """The picked sequences of every part, one part after another."""
    whole = len(parts) == 1 and len(picks[0]) == len(parts[0])

    def joined(arrays: list[np.ndarray]) -> np.ndarray:
        if whole:
            return arrays[0]
        return np.concatenate([array[pick] for array, pick in zip(arrays, picks, strict=True)])

    input_ids = joined([part.input_ids for part in parts])
    label_mask = joined([part.label_mask for part in parts])
    resets = [part.document_ids for part in parts if part.document_ids is not None]
    document_ids = joined(resets) if resets else None
    info = {
        "sequences": len(input_ids),
        "sequence_length": int(input_ids.shape[1]),
        "tokens": int(input_ids.size),
        "label_tokens": int(label_mask.sum()),
        "fingerprint": fingerprint(input_ids, label_mask, document_ids),
        "sources": [part.info | {"sequences_used": len(pick)} for part, pick in zip(parts, picks, strict=True)],
    }
    return PackedDataset(input_ids, label_mask, document_ids, info)


def _nothing(config: DataSection, path: str, counts: dict[str, Any], split: str) -> str:
    """Why a split came out empty, and what to do."""
    if counts["rows_skipped"] == counts["rows"]:
        return f"{path}: nothing is left of the {counts['rows']} {split} rows: all are empty or lack an answer"
    if counts["tokens_read"] < config.sequence_length:
        more = "raise data.validation_rows" if split == "validation" else "give more data"
        return (
            f"{path}: the {counts['rows']} {split} rows hold {counts['tokens_read']} tokens, less than one "
            f"sequence of {config.sequence_length}: {more}, or lower data.sequence_length"
        )
    return (
        f"{path}: no {split} sequence of {config.sequence_length} tokens holds a token to learn: answers are "
        f"missing, or prompts are too long: raise data.sequence_length, or set data.loss_on=all"
    )


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """A temporary folder for unpacked data, on the cache's disk where that can be written."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".reading-", dir=parent)
    except OSError:
        folder = tempfile.TemporaryDirectory(prefix="lolcats-")
    with folder as name:
        yield Path(name)


def _bar(shown: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=sys.stderr), disable=not shown)
