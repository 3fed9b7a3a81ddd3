"""Training data of any size: read, tokenised and packed during training, without a pass before it.

A stream's sequences are those that packing makes of the same rows, in the same order; a source that ends begins again.
They are numbered, and read by blocks, of which two are in memory. What is generated or needs all its rows at once is
packed before, as without streaming, and its sequences are repeated.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import datasets
import numpy as np
import torch

from lolcats.config import DataSection
from lolcats.data.build import build_datasets, moved, progress_bar, tell_skipped
from lolcats.data.cache import content_hash, tokenizer_hash
from lolcats.data.packed import BatchSampler, PackedDataset, seeded_permutation
from lolcats.data.packing import pack_rows
from lolcats.data.sources import OpenSource, StreamedSource, detect_format, encoded, json_features, open_streamed
from lolcats.data.splits import check_rows, first_sequences, sequence_limit
from lolcats.data.stream_readers import RepeatedReader, StreamReader, picked, reading
from lolcats.errors import UserError
from lolcats.parallel.group import SINGLE, Group

BLOCK_SEQUENCES = 1024
"""Sequences among which batches are shuffled (a multiple of the batch), and which are read at a time."""
ENDLESS = 2**53  # sequences of an epoch without `max_train_tokens`: more than a run can see

Position = list[dict[str, Any]]
"""Where a stream stands: plain values of each source."""


@dataclass(frozen=True, eq=False)
class StreamedDataset:
    """What is to be streamed. `len` is an epoch's sequences: `max_train_tokens`, or ever more."""

    config: DataSection
    tokenizer: Any
    sources: list[StreamedSource | PackedDataset]
    info: dict[str, Any]
    """Format of each source and whether it is streamed; a fingerprint of files, tokenizer and validation split."""

    def __len__(self) -> int:
        return sequence_limit(self.config) or ENDLESS

    @property
    def position_offset(self) -> int:
        return int(self.config.position_offset)


def build_streams(
    config: DataSection, tokenizer: Any, *, progress: bool = True
) -> tuple[StreamedDataset, PackedDataset]:
    """Training data to stream, and the validation split: the first `validation_rows` rows of each source, packed.

    Raises:
        UserError: data that cannot be used.
    """
    if not config.sources:
        raise UserError("no data: give at least one source (--data), for example --data 'shards/*.parquet'")
    sequence_limit(config)
    sources: list[StreamedSource | PackedDataset] = []
    validation_parts = []
    for source in config.sources:
        opened = open_streamed(source)
        first = None if opened is None else _first_rows(opened, config.held_out(source))
        if opened is None or first is None:
            whole = {"sources": [source], "max_train_tokens": None, "validation_sequences": None}
            packed, part = build_datasets(config.model_copy(update=whole), tokenizer, seed=0, progress=progress)
            sources.append(packed)
            validation_parts.append(replace(part, info=part.info["sources"][0]))
        else:
            sources.append(opened)
            with progress_bar(progress) as bar:
                validation_parts.append(pack_rows(config, OpenSource(source, ""), first, 0, tokenizer, bar))
    validation = first_sequences(config, validation_parts)
    tell_skipped(progress, validation)
    files = [one.files if isinstance(one, StreamedSource) else one.info["fingerprint"] for one in sources]
    described = [
        {name: part.info[name] for name in ("path", "format")} | {"streamed": isinstance(one, StreamedSource)}
        for one, part in zip(sources, validation_parts, strict=True)
    ]
    identity = [files, tokenizer_hash(tokenizer), validation.info["fingerprint"]]
    info = {"sequence_length": config.sequence_length, "sources": described, "fingerprint": content_hash(identity)}
    return StreamedDataset(config, tokenizer, sources, info), validation


def _first_rows(opened: StreamedSource, held_out: int) -> datasets.Dataset | None:
    """The validation rows; None if the source's format needs all rows at once."""
    source = opened.source
    with reading(source.path, 0):
        stream = opened.rows()
        rows = list(islice(stream, min(held_out + 1, source.max_rows or held_out + 1)))
    check_rows(source.path, len(rows), held_out)
    if stream.features is None:
        known = [name for name in rows[0] if any(row[name] is not None for row in rows)]
        coded = [encoded(row, known) for row in rows[:held_out]]
        first = datasets.Dataset.from_list(coded, features=json_features(known))
    else:
        first = datasets.Dataset.from_list(rows[:held_out], features=stream.features)
    return None if detect_format(source, first.column_names) == "multiple_choice" else first


class Stream(BatchSampler):
    """The batches of one stage, in their order, from the first; nothing is read before one is asked for.

    An epoch's sequences are shuffled within blocks, differently in every epoch. Rank 0 reads, one block ahead in a
    thread, and gives the blocks to the other ranks: batches are the same for any number of them.
    """

    def __init__(self, data: StreamedDataset, batch_size: int, seed: int, group: Group = SINGLE) -> None:
        super().__init__(len(data), batch_size, seed)
        self.data, self.group = data, group
        self.block_size = batch_size * max(1, BLOCK_SEQUENCES // batch_size)
        self.blocks = -(-self.steps_per_epoch * batch_size // self.block_size)
        self._thread = ThreadPoolExecutor(1)
        self._readers: list[StreamReader | RepeatedReader] | None = None
        self._block: PackedDataset | None = None
        self._start: Position | None = None
        """Where the block in memory begins; before there is one, the first to be read. None: at the first rows."""
        self._end: Position | None = None
        self._ahead: Future[tuple[Position, PackedDataset, Position]] | None = None

    def indices(self, step: int) -> np.ndarray:
        epoch, place = divmod(step, self.steps_per_epoch)
        block, within = divmod(place * self.batch_size, self.block_size)
        order = seeded_permutation(self._size(block), self.seed, epoch, block)
        return block * self.block_size + order[within : within + self.batch_size]

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """As `PackedDataset.batch`, of one update; all ranks ask in the order of updates."""
        first = int(indices[0]) // self.block_size * self.block_size
        if self._block is None or self._block.first != first:
            with self.group.sync_errors():
                block = self._next_block(first // self.block_size) if self.group.is_main else None
            self._block = self.group.broadcast(block)
            assert self._block is not None
        return self._block.batch(indices)

    def position(self, step: int) -> Position | None:
        """Where the block of `step`, the update after those made, begins; known to rank 0 alone."""
        first = int(self.indices(step)[0]) // self.block_size * self.block_size
        if self._block is None or self._block.first == first:
            return self._start
        return self._end if first else None

    def seek(self, position: Position | None) -> None:
        """Resume: the next block begins here."""
        self._start, self._block, self._ahead = position, None, None

    def close(self) -> None:
        """No more is read."""
        self._thread.shutdown(cancel_futures=True)
        for reader in self._readers or ():
            if isinstance(reader, StreamReader):
                reader.close()

    def _size(self, block: int) -> int:
        return min(self.block_size, self.num_sequences - block * self.block_size)

    def _next_block(self, number: int) -> PackedDataset:
        ahead = self._ahead or self._thread.submit(self._read, number, self._start)
        self._start, block, self._end = ahead.result()
        self._ahead = None if self.blocks == 1 else self._thread.submit(self._read, (number + 1) % self.blocks)
        return block

    def _read(self, number: int, start: Position | None = None) -> tuple[Position, PackedDataset, Position]:
        """Where a block begins, the block, and where it ends.

        Args:
            start: where to begin; None: at the end of the block before, the first one at the first rows.
        """
        if self._readers is None:
            config, tokenizer = self.data.config, self.data.tokenizer
            formats = [described["format"] for described in self.data.info["sources"]]
            self._readers = [
                StreamReader(config, tokenizer, source, form)
                if isinstance(source, StreamedSource)
                else RepeatedReader(source)
                for source, form in zip(self.data.sources, formats, strict=True)
            ]
        if number == 0 or start is not None:
            for place, reader in enumerate(self._readers):
                reader.seek(start[place] if start is not None else None)
        start = [reader.position() for reader in self._readers]
        weights = [source.weight for source in self.data.config.sources]
        origins_N = mixture_order([reader.given for reader in self._readers], weights, self._size(number))
        counts = np.bincount(origins_N, minlength=len(weights)).tolist()
        parts = [part for reader, count in zip(self._readers, counts, strict=True) for part in reader.take(count)]
        order_N = np.argsort(np.argsort(origins_N, kind="stable"))  # the parts come source by source
        block = moved(picked(parts, order_N), self.data.config)
        end = [reader.position() for reader in self._readers]
        return start, replace(block, first=number * self.block_size), end


def mixture_order(given: list[int], weights: list[float], count: int) -> np.ndarray:
    """[count] int64: the source of each of the next sequences, always the one that is furthest behind its share.

    Args:
        given: sequences of each source before.
    """
    shares_M = np.array(weights) / sum(weights)
    given_M = np.array(given)
    order = np.empty(count, np.int64)
    for place in range(count):
        order[place] = np.argmax((given_M.sum() + 1) * shares_M - given_M)
        given_M[order[place]] += 1
    return order
