"""Opening the data sets of the mixture: hub, local files, or the text shipped with the package.

`datasets` reads and caches all but text files, which become paragraphs. This module finds files, tells formats apart by
their columns and turns failures into messages.
"""

from __future__ import annotations

import glob
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pandas
import pyarrow
from datasets import data_files

from lolcats.config import DataSource
from lolcats.data.cache import DATA_FORMAT, cache_directory
from lolcats.data.templates import CONTINUES, CONVERSATIONS, PAIRS
from lolcats.errors import UserError

DEMO = Path(__file__).parent / "demo"
DEMO_EVALUATION = 200  # rows of the shipped text, its first ones, that are never trained on
SUFFIXES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".txt": "text"}
READABLE = ".json, .jsonl, .csv, .tsv, .parquet or .txt (each also with .gz, except .parquet)"
GENERATED = {"retrieval": 2000, "passkey": 10_000}
"""Texts without max_rows: 4 million tokens in texts of 2048; as many as the paper trains on."""
WHOLE_FILE = 2**30  # bytes from which `datasets` takes the types of JSON's columns


@dataclass(frozen=True)
class OpenSource:
    """A source that exists, its rows (at most `max_rows`), and what tells its content from other content."""

    source: DataSource
    data: datasets.Dataset
    fingerprint: str

    @property
    def reserved(self) -> int:
        """First rows that are never trained on: of the shipped text, which evaluations use."""
        return DEMO_EVALUATION if self.source.path == "demo" else 0

    def rows(self, evaluation: bool = False) -> datasets.Dataset:
        """All rows; for an evaluation those that are reserved, if any are."""
        return self.data.take(min(self.reserved, len(self.data))) if evaluation and self.reserved else self.data


def open_source(source: DataSource) -> OpenSource:
    """Find a source; its rows are downloaded or unpacked, once for one content."""
    fingerprint = ""
    if source.path in GENERATED:
        data = datasets.Dataset.from_dict({"index": list(range(source.max_rows or GENERATED[source.path]))})
        haystack = open_source(DataSource(path=source.haystack)).fingerprint if source.path == "retrieval" else ""
        fingerprint = f"{source.path}:2:{haystack}"
    else:
        with _explained(source):
            data = _load(source)
    if len(data) == 0:
        raise UserError(f"{source.path} holds no rows")
    fingerprint = fingerprint or data._fingerprint
    data = data.select(range(min(source.max_rows or len(data), len(data))))
    return OpenSource(source, data, fingerprint)


def _load(source: DataSource) -> datasets.Dataset:
    place = Path(source.path).expanduser()
    if source.path == "demo":
        files = sorted(DEMO.glob("*.jsonl.gz"))
    elif any((place / name).is_file() for name in ("state.json", "dataset_dict.json")):
        saved = datasets.load_from_disk(str(place))
        return _choose_split(source, saved if isinstance(saved, datasets.DatasetDict) else {"train": saved})
    elif _is_local(source.path):
        files = _find_files(source)
    else:
        return datasets.load_dataset(source.path, source.name, split=source.split)
    options: dict[str, Any] = {}
    kind = _kind(files[0])
    if kind == "text":
        return datasets.Dataset.from_list([row for file in files for row in _paragraphs(file)])
    if kind in ("csv", "tsv"):
        sep = "\t" if kind == "tsv" else ","
        options = {"sep": sep, "keep_default_na": False, "na_values": [""], "index_col": False}
        names = pandas.read_csv(files[0], sep=sep, nrows=0).columns
        options["features"] = datasets.Features(dict.fromkeys(names, datasets.Value("string")))
        kind = "csv"
    elif kind == "json":
        options = {"chunksize": WHOLE_FILE, "encoding": "utf-8-sig"}
    names, folder = [glob.escape(str(file.resolve())) for file in files], str(cache_directory() / f"rows-{DATA_FORMAT}")
    with warnings.catch_warnings():  # pandas would leave out the end of rows with more commas than columns
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        return datasets.load_dataset(kind, data_files=names, split="train", cache_dir=folder, **options)


def _paragraphs(file: Path) -> Iterator[dict[str, Any]]:
    """Rows of a text file, which is one document, so that some can be the validation split.

    Every paragraph but the first keeps the blank line before it: joined, they are the file again.
    """
    with fsspec.open(str(file), "rt", compression="infer", encoding="utf-8-sig") as stream:
        text = stream.read().strip()
    parts = re.split(r"(?<=\S)(?=[^\S\n]*\n[^\S\n]*\n\s*\S)", text) if text else []
    for number, part in enumerate(parts, 1):
        yield {"text": part, CONTINUES: number < len(parts)}


def detect_format(source: DataSource, columns: list[str]) -> str:
    """The source's format, after checking that its columns are there."""
    if source.path in GENERATED:
        return source.path
    pairs = [kind for asking, _, answering, kind in PAIRS if {asking, answering} <= set(columns)]
    fits = {
        "chat": bool({*CONVERSATIONS} & {*columns}) or (source.format == "chat" and bool(pairs)),
        "alpaca": "alpaca" in pairs,
        "prompt": "prompt" in pairs,
        "text": (source.text_column or "text") in columns,
    }
    chosen: str = source.format
    if chosen == "auto":
        chosen = "text" if source.text_column else next((form for form, there in fits.items() if there), "auto")
    if not fits.get(chosen):
        needs = {
            "chat": "'messages' or 'conversations', or 'instruction' and 'output'",
            "alpaca": "'instruction' and 'output', or 'question' and 'answer'",
            "prompt": "'prompt' and 'completion'",
            "text": repr(source.text_column or "text"),
        }
        expected = f"format {chosen} needs {needs[chosen]}" if chosen in needs else "no format for its columns"
        shown = ", ".join(repr(column) for column in columns if column != CONTINUES)
        raise UserError(
            f"{source.path}: {expected}; it has {shown}: rename them to 'instruction' and 'output', 'prompt' and"
            f" 'completion', 'messages' or 'text', or name the column of plain documents: --data"
            f" {source.path},text_column=NAME; of prompts alone {source.path},answers=teacher"
        )
    return chosen


def _is_local(path: str) -> bool:
    """Whether `path` means files: it exists, or it cannot be the name of a hub data set."""
    named_like_hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is not None
    return Path(path).expanduser().exists() or _kind(Path(path)) is not None or not named_like_hub


def _kind(file: Path) -> str | None:
    """What a file's name says that it holds (`SUFFIXES`); None: nothing that is read here."""
    name = file.name.lower()
    return SUFFIXES.get(Path(name.removesuffix(".gz")).suffix)


def _choose_split(source: DataSource, splits: Any) -> Any:
    if source.split not in splits:
        raise UserError(
            f"{source.path} has no split {source.split!r}, only {', '.join(map(repr, splits))}. Local files belong to"
            " the split that their names or their folders' names say (train, validation, test), others to 'train'"
        )
    return splits[source.split]


def _find_files(source: DataSource) -> list[Path]:
    path = source.path
    place = Path(path).expanduser()
    if place.is_dir():
        splits = _by_split(place)
    else:
        names = [place] if place.is_file() else [Path(name) for name in glob.glob(str(place), recursive=True)]
        splits = {"train": sorted(file for file in names if file.is_file())}
    if not any(splits.values()):
        raise UserError(f"data file not found: {path} (no such file or pattern, or a folder without {READABLE})")
    files = _choose_split(source, splits)
    kinds = {file: _kind(file) for file in files}
    for file, kind in kinds.items():
        if kind is None:
            raise UserError(f"cannot tell the format of {file} from its name: expected {READABLE}")
    if len(set(kinds.values())) > 1:
        mixed = " and ".join(sorted(map(str, set(kinds.values()))))
        raise UserError(f"{path} mixes {mixed} files: give them as separate sources")
    return files


def _by_split(folder: Path) -> dict[str, list[Path]]:
    """Files by split as `datasets` finds them: by names of shards, folders or files; else all are "train"."""
    base = glob.escape(str(folder.resolve()))
    for find in (lambda: data_files.get_data_patterns(base), lambda: {"train": ["**"]}):
        with suppress(FileNotFoundError):  # there are none
            found = data_files.DataFilesDict.from_local_or_remote(find(), base)
            splits = {
                split: sorted({Path(name) for name in names if _kind(Path(name))}) for split, names in found.items()
            }
            if any(splits.values()):
                return {str(split): files for split, files in splits.items() if files}
    return {}


@contextmanager
def _explained(source: DataSource) -> Iterator[None]:
    """Errors of `datasets` by their first cause."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # network, authorisation, a full disk, or data that are themselves broken
        causes: list[BaseException] = [error]
        while cause := causes[-1].__cause__ or causes[-1].__context__:
            causes.append(cause)
        # Arrow names the row; pandas, which `datasets` tries after it, does not.
        first = next((cause for cause in causes if isinstance(cause, pyarrow.ArrowInvalid)), causes[-1])
        why = f"{type(first).__name__}: {' '.join(str(first).split())[:500]}"
        if isinstance(first, StopIteration | pandas.errors.EmptyDataError) or "corresponds to no data" in why:
            why = "it holds no rows"
        elif isinstance(first, pandas.errors.ParserWarning):
            why = "rows have more columns than the first line names: quote texts with commas"
        elif isinstance(first, datasets.table.CastError):
            why = "its files differ in their columns: give each as a source of its own"
        if source.path == "demo" or _is_local(source.path):
            message = f"cannot read {source.path}: {why}"
            if isinstance(first, OSError):
                message += f" (rows are unpacked in {cache_directory()}, or LOLCATS_CACHE)"
        else:
            message = (
                f"cannot load data set {source.path!r}, which is no local file or folder, from the hub: {why}: check"
                f" the connection, the name and split ({source.split!r}), log in with `hf auth login`, or give a local"
                " file"
            )
        raise UserError(message) from error
