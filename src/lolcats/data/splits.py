"""The splits of several sources: what is held out, how much each source gives, and why nothing is left."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
from rich.progress import Progress

from lolcats.config import DataSection, DataSource
from lolcats.data.cache import ARRAYS
from lolcats.data.packed import PackedDataset, counted, seeded_permutation
from lolcats.data.packing import pack_rows
from lolcats.data.sources import OpenSource
from lolcats.errors import UserError


def training_and_validation(
    config: DataSection, opened: list[OpenSource], tokenizer: Any, seed: int, bar: Progress
) -> tuple[PackedDataset, PackedDataset]:
    """Both splits of the opened sources, as `build_datasets` describes them."""
    limit = sequence_limit(config)
    # One source needs no more tokens than are used; of several all are read, so that the choice is fair.
    max_tokens = limit * config.sequence_length if limit is not None and len(opened) == 1 else None
    training_parts, validation_parts = [], []
    for source in opened:
        rows, held_out = source.rows(), config.held_out(source.source)
        begin = max(held_out, source.reserved)
        if len(rows) <= begin:
            raise UserError(
                f"{source.source.path} has {len(rows)} rows, and the first {begin} of each source are the validation"
                " split, so none is left to train on: lower data.validation_rows"
            )
        first, rest = rows.select(range(held_out)), rows.select(range(begin, len(rows)))
        validation_parts.append(pack_rows(config, source, first, 0, tokenizer, bar))
        training_parts.append(pack_rows(config, source, rest, begin, tokenizer, bar, max_tokens))
        if len(training_parts[-1]) == 0:
            raise UserError(_nothing(config, source.source.path, training_parts[-1].info, "training"))
    counts = mixture_counts([len(part) for part in training_parts], config.sources, limit)
    picks = [
        np.sort(np.resize(seeded_permutation(len(part), seed, place), count))  # a seeded choice, in the original order
        for place, (part, count) in enumerate(zip(training_parts, counts, strict=True))
    ]
    training = _join(training_parts, picks)
    if len(training) == 0:
        raise UserError(
            "the weights leave no training sequence: make them less unequal, or give more of the source "
            "with the largest weight"
        )
    return training, first_sequences(config, validation_parts)


def sequence_limit(config: DataSection) -> int | None:
    """Sequences of `max_train_tokens`; None: no limit."""
    if config.max_train_tokens is None:
        return None
    if config.max_train_tokens < config.sequence_length:
        raise UserError(
            f"data.max_train_tokens={config.max_train_tokens} is less than one sequence "
            f"(data.sequence_length={config.sequence_length}): raise it, or lower the length"
        )
    return config.max_train_tokens // config.sequence_length


def first_sequences(config: DataSection, parts: list[PackedDataset]) -> PackedDataset:
    """The first sequences of each source: all, or `validation_sequences` in the sources' proportions."""
    available = [len(part) for part in parts]
    counts = mixture_counts(available, [], config.validation_sequences)
    data = _join(parts, [np.arange(count) for count in counts])
    if len(data) == 0:
        part = parts[0].info
        raise UserError(_nothing(config, part["path"], part, "validation"))
    return data


def _join(parts: list[PackedDataset], picks: list[np.ndarray]) -> PackedDataset:
    """The picked sequences of every part, one part after another."""
    pairs = list(zip(parts, picks, strict=True))
    input_ids, label_mask = (np.concatenate([getattr(part, x)[pick] for part, pick in pairs]) for x in ARRAYS)
    sources = [part.info | {"sequences_used": len(pick)} for part, pick in pairs]
    info = {"sequence_length": int(input_ids.shape[1]), "sources": sources}
    return counted(input_ids, label_mask, info)


def _nothing(config: DataSection, path: str, counts: dict[str, Any], split: str) -> str:
    """Why a split came out empty, and what to do."""
    if counts["rows_skipped"] == counts["rows"]:
        return f"{path}: nothing is left of the {counts['rows']} {split} rows: {skipped_rows(counts)}"
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


def skipped_rows(counts: dict[str, Any]) -> str:
    """How many rows were skipped and why, the commonest reasons first."""
    return "; ".join(f"{count} x {reason}" for reason, count in Counter(counts["skipped"]).most_common(5))


def is_weighted(sources: list[DataSource]) -> bool:
    """Whether the weights, rather than the sources' sizes, decide the shares."""
    return len({source.weight for source in sources}) > 1 or any(source.repeat for source in sources)


def mixture_counts(available: list[int], sources: list[DataSource], limit: int | None = None) -> list[int]:
    """Sequences to take from every source, of which there are as many as `available` says.

    Unequal weights are the sources' shares of the mixture's sequences (to within one sequence). The
    mixture is the largest that repeats no source but those that may be: the source that is scarce for its weight is
    used in full. Equal weights use every source in full. `limit` caps the total and keeps the shares.
    """
    total = sum(available)
    if total == 0:
        return [0] * len(available)
    if is_weighted(sources):
        exact = [Fraction(str(source.weight)) for source in sources]  # decimal, so that 0.3 is three tenths
        shares = [weight / sum(exact) for weight in exact]
        sizes = [count / share for count, share in zip(available, shares, strict=True)]
        limiting = [size for size, source in zip(sizes, sources, strict=True) if not source.repeat]
        size = int(min(limiting or sizes))
    else:
        shares = [Fraction(count, total) for count in available]
        size = total
    if limit is not None:
        size = min(size, limit)
    ideal = [size * share for share in shares]
    counts = [int(value) for value in ideal]
    # Largest remainders first; rounding up never exceeds what is available of sources that are not repeated.
    by_remainder = sorted(range(len(ideal)), key=lambda source: (counts[source] - ideal[source], source))
    for source in by_remainder[: size - sum(counts)]:
        counts[source] += 1
    return counts
