"""The packed training sequences of one source of a stream, and the place in its rows from which reading continues."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from lolcats.config import DataSection
from lolcats.data.cache import ARRAYS
from lolcats.data.packed import PackedDataset
from lolcats.data.packing import TokenStream, begin_token, pack, read_documents, template_for, tokenise
from lolcats.data.sources import StreamedSource, root_cause
from lolcats.data.templates import Document
from lolcats.errors import UserError

logger = logging.getLogger(__name__)

FIRST: dict[str, Any] = {"rows": None, "rest": ((), ()), "given": 0, "taken": 0, "pass_from": 0}
"""A position before the first row."""


class RepeatedReader:
    """The sequences of a packed source, again and again; as `StreamReader`."""

    def __init__(self, packed: PackedDataset) -> None:
        self.packed, self.given = packed, 0

    def position(self) -> dict[str, Any]:
        return {"given": self.given}

    def seek(self, position: dict[str, Any] | None) -> None:
        self.given = position["given"] if position else 0

    def take(self, count: int) -> list[PackedDataset]:
        rows = np.arange(self.given, self.given + count) % len(self.packed)
        self.given += count
        return [picked([self.packed], rows)]


class StreamReader:
    """The packed training sequences of one source, pass after pass.

    Attributes:
        given: sequences taken so far.
    """

    def __init__(self, config: DataSection, tokenizer: Any, opened: StreamedSource, form: str) -> None:
        self.config, self.tokenizer, self.opened, self.source = config, tokenizer, opened, opened.source
        self.held_out = config.held_out(self.source)
        self.template, self.columns = template_for(form, config, self.source, tokenizer)
        self.batches: Generator[list[list[Document] | str]] | None = None
        self.packed: PackedDataset | None = None
        self.taken = 0
        self.told: set[str] = set()

    def position(self) -> dict[str, Any]:
        """Plain values: where the rows in memory begin, and how many of their sequences were taken."""
        return self.before | {"given": self.given, "taken": self.taken}

    def seek(self, position: dict[str, Any] | None) -> None:
        """Go to a `position`; None: the first training row."""
        at = position or FIRST | {"row": self.held_out}
        ids, labels = at["rest"]
        self.rest = np.array(ids, np.int32), np.array(labels, np.bool_)
        self.given, self.pass_from = at["given"] - at["taken"], at["pass_from"]
        self._open(at["rows"], at["row"])
        self.take(at["taken"])

    def take(self, count: int) -> list[PackedDataset]:
        """The next sequences, in parts.

        Raises:
            UserError: rows that cannot be read or used, or a whole pass without a sequence.
        """
        parts: list[PackedDataset] = []
        while count:
            if self.packed is None or self.taken == len(self.packed):
                self._read()
                continue
            stop = min(self.taken + count, len(self.packed))
            parts.append(picked([self.packed], slice(self.taken, stop)))
            count -= stop - self.taken
            self.given += stop - self.taken
            self.taken = stop
        return parts

    def close(self) -> None:
        if self.batches is not None:
            self.batches.close()

    def _open(self, state: dict[str, Any] | None, row: int) -> None:
        """Read on from a state of the rows; None: from the first training row."""
        self.close()
        with reading(self.source.path, row):
            rows = self.opened.rows()
            if rows.column_names is not None:
                rows = rows.select_columns([name for name in rows.column_names if name in self.columns])
            rows = rows.skip(self.held_out)
            if self.source.max_rows is not None:
                rows = rows.take(self.source.max_rows - self.held_out)
            if state is not None:
                rows.load_state_dict(state)
        self.rows, self.row, self.rows_state = rows, row, state
        self.batches = read_documents(
            rows, self.template, name=self.source.path, first_row=row, advance=lambda count: None
        )
        self._forget()

    def _forget(self) -> None:
        """There are no sequences in memory, and reading begins here."""
        self.packed, self.taken = None, 0
        rest = [values.tolist() for values in self.rest]
        self.before = {"rows": self.rows_state, "row": self.row, "rest": rest, "pass_from": self.pass_from}

    def _read(self) -> None:
        """The sequences of the next rows, or the beginning of the next pass."""
        assert self.batches is not None
        with reading(self.source.path, self.row):
            documents = next(self.batches, None)
        if documents is None:
            if self.given == self.pass_from:
                raise UserError(
                    f"{self.source.path}: no training sequence of {self.config.sequence_length} tokens with a token to"
                    " learn in all rows: give more data, or lower data.sequence_length"
                )
            self.pass_from = self.given
            self._open(None, self.held_out)
            return
        self._forget()
        self.row += len(documents)
        self.rows_state = self.rows.state_dict()
        loss_on = self.source.loss_on or self.config.loss_on
        read = tokenise([documents], self.tokenizer, loss_on=loss_on)
        for reason in sorted(read.skipped.keys() - self.told):
            logger.warning("%s: rows are skipped, up to row %d: %s", self.source.path, self.row, reason)
        self.told |= read.skipped.keys()
        ids_R, labels_R = self.rest
        ids_S, labels_S = np.concatenate([ids_R, read.token_ids]), np.concatenate([labels_R, read.is_label])
        self.packed = pack(
            TokenStream(ids_S, labels_S, read.document_ids, len(documents), {}),
            self.config.sequence_length,
            begin_with=begin_token(self.tokenizer) if self.config.begin_token else None,
        )
        used = len(ids_S) - self.packed.info["tokens_dropped_at_end"]
        self.rest = ids_S[used:], labels_S[used:]


def picked(parts: list[PackedDataset], rows: slice | np.ndarray) -> PackedDataset:
    """Some of the sequences of data sets one after another."""
    columns = {name: [getattr(part, name) for part in parts] for name in ARRAYS}
    joined: dict[str, Any] = {name: np.concatenate(arrays)[rows] for name, arrays in columns.items()}
    return PackedDataset(**joined)


@contextmanager
def reading(path: str, row: int) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # whatever reading raises concerns the source
        raise UserError(f"cannot read {path} after row {row}: {root_cause(error)}") from error
