"""Training, validation and evaluation data from a data section: the package's main functions."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lolcats.config import DataSection
from lolcats.data import cache, sources
from lolcats.data.packed import MOVES, PackedDataset
from lolcats.data.packing import pack_rows
from lolcats.data.splits import first_sequences, is_weighted, sequence_limit, skipped_rows, training_and_validation
from lolcats.errors import UserError


def build_datasets(
    config: DataSection, tokenizer: Any, *, seed: int, vocabulary: int | None = None, progress: bool = True
) -> tuple[PackedDataset, PackedDataset]:
    """Training and validation split, from the cache if the same content was packed before.

    The first `validation_rows` rows of each source are its validation split, packed in the original order;
    the other rows are packed in theirs and mixed as `mixture_counts` says. `max_train_tokens` takes the
    first sequences of a single source, and a seeded choice in the same shares from several.

    vocabulary: rows of the model's embedding; rows with special tokens beyond it, which a tokenizer may have, are an
    error. Raises UserError for data that cannot be used.
    `position_offset`, `position_jumps` and `position_share` hold for the training split.
    """
    opened = _open(config)
    sequence_limit(config)
    # The seed matters, and enters the cache's key, only where a choice of sequences is made.
    chosen = len(opened) > 1 and (is_weighted(config.sources) or config.max_train_tokens is not None)
    file = _cache_file(config, opened, tokenizer, "training", seed if chosen else None)

    def build() -> dict[str, PackedDataset]:
        with progress_bar(progress) as bar:
            train, validation = training_and_validation(config, opened, tokenizer, seed, bar)
            return {"train": train, "validation": validation}

    splits = cache.load_or_build(file, build)
    train, validation = splits["train"], splits["validation"]
    tell_skipped(progress, train, validation)
    last = max(int(split.input_ids.max()) for split in (train, validation))
    if vocabulary is not None and last >= vocabulary:
        raise UserError(
            f"the data contain {tokenizer.decode([last])}, a special token that the model's embedding of {vocabulary}"
            " rows does not have: remove it from the data"
        )
    return moved(train, config), validation


def moved(data: PackedDataset, config: DataSection) -> PackedDataset:
    """`data` at the positions that `config` says, which `fit_positions` has made numbers of."""
    if "auto" in (config.position_offset, config.position_jumps):
        raise ValueError("positions are still 'auto': conversion.fit_positions(data, model) makes numbers of them")
    return replace(data, **config.model_dump(include=set(MOVES)))


def build_evaluation_dataset(config: DataSection, tokenizer: Any, *, progress: bool = True) -> PackedDataset:
    """All rows of all sources in their order, as one split to measure perplexity on.

    Nothing is held out, weights and `max_train_tokens` do not apply, and the incomplete last sequence of
    each source is filled up (with tokens that are not labels) instead of dropped.
    """
    opened = _open(config)
    file = _cache_file(config, opened, tokenizer, "evaluation", None)

    def build() -> dict[str, PackedDataset]:
        with progress_bar(progress) as bar:
            parts = [pack_rows(config, source, source.rows(True), 0, tokenizer, bar, pad=True) for source in opened]
        return {"evaluation": first_sequences(config, parts)}

    data = cache.load_or_build(file, build)["evaluation"]
    tell_skipped(progress, data)
    return data


def tell_skipped(shown: bool, *splits: PackedDataset) -> None:
    """Say on standard error how many rows of each source are not used, and why, and of which source nothing is."""
    for parts in zip(*(split.info["sources"] for split in splits), strict=True) if shown else ():
        counts: Counter[str] = sum((Counter(part["skipped"]) for part in parts), Counter())
        notes = ["no training sequence is left of it"] if parts[0].get("sequences_used") == 0 else []
        if counts:
            rows, why = sum(part["rows"] for part in parts), skipped_rows({"skipped": counts})
            notes.append(f"{counts.total()} of {rows} rows are not used: {why}")
        for note in notes:
            Console(file=sys.stderr).print(f"{parts[0]['path']}: {note}", markup=False, highlight=False, soft_wrap=True)


def _open(config: DataSection) -> list[sources.OpenSource]:
    if not config.sources:
        raise UserError("no data: give at least one source (--data), for example --data demo")
    return [sources.open_source(source) for source in config.sources]


def _cache_file(
    config: DataSection, opened: list[sources.OpenSource], tokenizer: Any, kind: str, seed: int | None
) -> Path:
    settings = config.model_dump(mode="json", exclude=set(MOVES))  # which do not change what is packed
    for source in settings["sources"]:
        del source["path"]  # the content counts, not where it lies
    key = cache.content_hash(
        {
            "data_format": cache.DATA_FORMAT,
            "kind": kind,
            "config": settings,
            "content": [source.fingerprint for source in opened],
            "tokenizer": cache.tokenizer_hash(tokenizer),
            "seed": seed,
        }
    )
    return cache.cache_directory() / f"packed-{key[:32]}.safetensors"


def progress_bar(shown: bool) -> Progress:
    """A bar that counts rows or sequences, on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=sys.stderr), disable=not shown)
