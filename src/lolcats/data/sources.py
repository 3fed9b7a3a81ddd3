"""Opening the data sets of the mixture: hub, local files, or the text shipped with the package.

Hub data sets and Parquet are read by the `datasets` library. Rows of the other files are parsed here and kept as
`datasets.Json`, whose columns need no common type; this module finds files, tells formats apart by their columns and
turns failures into messages.
"""

from __future__ import annotations

import csv
import errno
import glob
import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import datasets
import pyarrow
from datasets import data_files

from lolcats.config import DataSource
from lolcats.data import passkey
from lolcats.data.cache import DATA_FORMAT, cache_directory
from lolcats.data.templates import CONTINUES, CONVERSATIONS, PAIRS
from lolcats.errors import UserError

DEMO = Path(__file__).parent / "demo"
DEMO_EVALUATION = 200  # rows of the shipped text, its first ones, that are never trained on
SUFFIXES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".txt": "text"}
READABLE = ".json, .jsonl, .csv, .tsv, .parquet or .txt (each also with .gz or .zst, except .parquet)"
RETRIEVAL_TEXTS = 2000  # without max_rows: 4 million tokens in texts of 2048
Format = Literal["alpaca", "chat", "prompt", "text", "passkey", "retrieval"]


@dataclass(frozen=True)
class OpenSource:
    """A source that exists, with the hash of its content; `rows` reads it."""

    source: DataSource
    content_hash: str
    files: tuple[Path, ...] = ()
    hub_data: Any = None

    @property
    def reserved(self) -> int:
        """First rows that are never trained on: of the shipped text, which evaluations use."""
        return DEMO_EVALUATION if self.source.path == "demo" else 0

    def rows(self, evaluation: bool = False) -> datasets.Dataset:
        """All rows (at most `max_rows`). Those of local files are unpacked into the data cache, once for one content.

        evaluation: only those that are reserved, if any are.
        """
        data = self.hub_data if self.hub_data is not None else _read_files(self)
        most = min(self.source.max_rows or len(data), self.reserved if evaluation and self.reserved else len(data))
        data = data.select(range(most)) if most < len(data) else data
        if len(data) == 0:
            raise UserError(f"{self.source.path} holds no rows")
        return data


def open_source(source: DataSource) -> OpenSource:
    """Find a source and hash its content; hub data sets are downloaded (or found in the hub's cache)."""
    if source.path == "retrieval":
        numbers = {"index": list(range(source.max_rows or RETRIEVAL_TEXTS))}
        around = open_source(DataSource(path=source.haystack))
        hash_of_all = f"retrieval:2:{around.content_hash}"
        return OpenSource(source, hash_of_all, hub_data=datasets.Dataset.from_dict(numbers))
    if source.path == "passkey":
        rows = passkey.draw(source.max_rows or passkey.TRAINING_SAMPLES, source.seed)
        return OpenSource(source, "passkey:1", hub_data=datasets.Dataset.from_list(rows))
    if source.path == "demo":
        files = sorted(DEMO.glob("*.jsonl.gz"))
    elif (saved := _load_saved(source)) is not None:
        return OpenSource(source, f"saved:{saved._fingerprint}", hub_data=saved)
    elif _is_local(source.path):
        files = _find_files(source)
    else:
        with _hub_errors(source), quiet():
            data = datasets.load_dataset(source.path, source.name, split=source.split)
        return OpenSource(source, f"hub:{data._fingerprint}", hub_data=data)
    digest = hashlib.sha256()
    for file in files:
        content = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                content.update(block)
        digest.update(f"{_kind(file)}:{content.hexdigest()};".encode())
    return OpenSource(source, f"sha256:{digest.hexdigest()}", files=tuple(files))


def detect_format(source: DataSource, columns: list[str]) -> Format:
    """The source's format, after checking that its columns are there."""
    if source.path in ("passkey", "retrieval"):
        return source.path  # type: ignore[return-value]  # one of the two
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
            f" {source.path},text_column=NAME"
        )
    return chosen  # type: ignore[return-value]


def _is_local(path: str) -> bool:
    """Whether `path` means files: it exists, or it cannot be the name of a hub data set."""
    named_like_hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is not None
    return Path(path).expanduser().exists() or _kind(Path(path)) is not None or not named_like_hub


def _kind(file: Path) -> str | None:
    """What a file's name says that it holds (`SUFFIXES`); None: nothing that is read here."""
    name = file.name.lower()
    return SUFFIXES.get(Path(name.removesuffix(".gz").removesuffix(".zst")).suffix)


def _load_saved(source: DataSource) -> Any:
    """A folder that `save_to_disk` wrote, of a data set or of several splits; None if it is none."""
    place = Path(source.path).expanduser()
    if not any((place / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return None
    try:
        with quiet():
            saved = datasets.load_from_disk(str(place))
    except Exception as error:  # whatever reading raises concerns these files
        raise UserError(f"cannot read {source.path}: {root_cause(error)}") from error
    splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    return _choose_split(source, splits)


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


def _read_files(opened: OpenSource) -> datasets.Dataset:
    source, files, unpacked = opened.source, opened.files, cache_directory() / "rows"
    try:
        unpacked.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot unpack {source.path} into {unpacked} ({error}); set LOLCATS_CACHE") from error
    try:
        with quiet():
            if _kind(files[0]) == "parquet":
                names = [glob.escape(str(file.resolve())) for file in files]
                return datasets.load_dataset("parquet", data_files=names, split="train", cache_dir=str(unpacked))
            columns = dict.fromkeys(chain.from_iterable(_rows_of(files)))
            if not columns:
                raise UserError(f"{source.path} holds no rows")
            return datasets.Dataset.from_generator(
                lambda: (encoded(row, columns) for row in _rows_of(files)),
                features=json_features(columns),
                cache_dir=str(unpacked),
                fingerprint=f"{DATA_FORMAT}-{opened.content_hash[-32:]}",
            )
    except Exception as error:  # whatever reading raises concerns these files
        if told := [cause for cause in _causes(error) if isinstance(cause, UserError)]:
            raise told[0] from None
        cause = root_cause(error)
        if any(os.strerror(number) in cause for number in (errno.ENOSPC, errno.EDQUOT)):
            raise UserError(
                f"no room to unpack {source.path} in {unpacked} ({cause}); make some, or set LOLCATS_CACHE to a"
                " folder on another disk"
            ) from error
        raise UserError(f"cannot read {source.path}: {cause}") from error


def json_features(columns: Iterable[str]) -> datasets.Features:
    """Columns that hold anything that JSON has, row by row."""
    return datasets.Features({name: datasets.Json() for name in columns})


def encoded(row: dict[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    """A row for `json_features`, which would take the text "42" for a number."""
    return {name: None if row.get(name) is None else json.dumps(row[name]) for name in columns}


def _rows_of(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """All rows of files."""
    return chain.from_iterable(map(_file_rows, files))


def _file_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file that is not Parquet.

    A text file is one document; its paragraphs become rows, so that some can be the validation split. Every paragraph
    but the first keeps the blank line before it: joined, they are the file again.
    """
    kind = _kind(file)
    if kind == "text":
        text = "".join(_lines(file)).replace("\r\n", "\n").strip()
        parts = re.split(r"(?<=\S)(?=[^\S\n]*\n[^\S\n]*\n\s*\S)", text) if text else []
        for number, part in enumerate(parts, 1):
            yield {"text": part, CONTINUES: number < len(parts)}
    elif kind in ("csv", "tsv"):
        csv.field_size_limit(sys.maxsize)
        reader = csv.DictReader(_lines(file), delimiter="\t" if kind == "tsv" else ",")
        for row in reader:
            if None in row:
                raise UserError(
                    f"{file}, line {reader.line_num}: more cells than the {len(row) - 1} columns of its first line"
                )
            yield {name: value or None for name, value in row.items()}
    else:
        yield from _json_rows(file)


def _json_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Rows of JSON lines, or of one value: an array of rows, or a row over several lines."""

    def parse(text: str, line: int) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{file}, line {line + error.lineno - 1}: not valid JSON ({error.msg})") from error

    numbered = ((number, line) for number, line in enumerate(_lines(file), 1) if line.strip())
    number, head = next(numbered, (1, "[]"))
    unit, whole = "line", head.lstrip().startswith("[")
    try:
        rows: Any = chain(
            [(number, json.loads(head))], ((number, parse(line.strip(), number)) for number, line in numbered)
        )
    except json.JSONDecodeError:
        whole = True
    if whole:
        value = parse("".join(_lines(file)) or head, 1)
        unit, rows = "item", enumerate(value if isinstance(value, list) else [value], 1)
    for number, row in rows:
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise UserError(f"{file}, {unit} {number}: expected an object with named columns, got a {kind}")
        yield row


def _lines(file: Path) -> Iterator[str]:
    """Lines of UTF-8 text, unpacked, with their ends."""
    try:
        with io.BufferedReader(pyarrow.input_stream(str(file))) as stream:
            for number, line in enumerate(stream, 1):
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    encoding = "UTF-16" if line[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
                    raise UserError(
                        f"{file}, line {number}, byte {error.start + 1}: 0x{line[error.start]:02x} is not UTF-8;"
                        f" convert it (unpacked): iconv -f {encoding} -t UTF-8 OLD > NEW"
                    ) from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error}") from error


@contextmanager
def _hub_errors(source: DataSource) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # network, authorisation, or a data set that is itself broken
        raise UserError(
            f"cannot load data set {source.path!r}, which is no local file or folder, from the hub: "
            f"{root_cause(error)}: check the connection, the name and split ({source.split!r}), log in with"
            " `hf auth login`, or give a local file"
        ) from error


def root_cause(error: BaseException) -> str:
    """The first cause in a chain of exceptions, on one line."""
    *_, first = _causes(error)
    return f"{type(first).__name__}: {' '.join(str(first).split())[:500]}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of `datasets` (reading is quick; tokenising has its own); downloads keep theirs.

    Nor its log: what goes wrong is raised, and said once.
    """
    shown = not datasets.are_progress_bars_disabled()
    verbosity = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if shown:
            datasets.enable_progress_bars()
