"""Opening the data sets of the mixture: hub, local files, or the text shipped with the package.

Everything is read by the `datasets` library; this module only finds files, tells formats apart by their
columns and turns failures into messages.
"""

from __future__ import annotations

import errno
import glob
import gzip
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets

from lolcats.config import DataSource
from lolcats.data import passkey
from lolcats.data.templates import CHOICE_COLUMNS, CONTINUES
from lolcats.errors import UserError

DEMO = Path(__file__).parent / "demo"
SUFFIXES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
READABLE = ".json, .jsonl, .parquet or .txt (each also with .gz, except .parquet)"
RETRIEVAL_TEXTS = 2000  # without max_rows: 4 million tokens in texts of 2048
Format = Literal["alpaca", "chat", "text", "multiple_choice", "passkey", "retrieval"]


@dataclass(frozen=True)
class OpenSource:
    """A source that exists, with the hash of its content; `rows` reads it."""

    source: DataSource
    content_hash: str
    files: tuple[Path, ...] = ()
    hub_data: Any = None

    def rows(self, scratch: Path) -> datasets.Dataset:
        """All rows (at most `max_rows`). Local files are unpacked into `scratch`, which must outlive them."""
        data = self.hub_data if self.hub_data is not None else _read_files(self.source, self.files, scratch)
        if self.source.max_rows is not None and len(data) > self.source.max_rows:
            data = data.select(range(self.source.max_rows))
        if len(data) == 0:
            raise UserError(f"{self.source.path} holds no rows")
        return data


def open_source(source: DataSource) -> OpenSource:
    """Find a source and hash its content; hub data sets are downloaded (or found in the hub's cache)."""
    if source.path == "retrieval":
        numbers = {"index": list(range(source.max_rows or RETRIEVAL_TEXTS))}
        around = open_source(DataSource(path=source.haystack))
        hash_of_all = f"retrieval:1:{around.content_hash}"
        return OpenSource(source, hash_of_all, hub_data=datasets.Dataset.from_dict(numbers))
    if source.path == "passkey":
        rows = passkey.draw(source.max_rows or passkey.TRAINING_SAMPLES, source.seed)
        return OpenSource(source, "passkey:1", hub_data=datasets.Dataset.from_list(rows))
    if source.path == "demo":
        files = sorted(DEMO.glob("*.jsonl.gz"))
    elif _is_local(source.path):
        files = _find_files(source.path)
    else:
        data = _load_hub(source)
        return OpenSource(source, f"hub:{data._fingerprint}", hub_data=data)
    digest = hashlib.sha256()
    for file in files:
        content = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                content.update(block)
        digest.update(f"{_kind(file)}:{content.hexdigest()};".encode())
    return OpenSource(source, f"sha256:{digest.hexdigest()}", files=tuple(files))


@dataclass(frozen=True)
class StreamedSource:
    """A source of which only the first rows were read; `rows` begins it again and again."""

    source: DataSource
    files: tuple[str, ...]
    """What it consists of: addresses with the hub's commit, or names and sizes in bytes of local files."""
    builder: Any
    split: str

    def rows(self) -> datasets.IterableDataset:
        """All rows, in order."""
        with quiet():
            return self.builder.as_streaming_dataset(split=self.split)


def open_streamed(source: DataSource) -> StreamedSource | None:
    """Find a source, without reading or downloading it; None if it is generated, shipped or a text file, which is one
    document."""
    if source.path in ("demo", "passkey", "retrieval"):
        return None
    if not _is_local(source.path):
        with _hub_errors(source), quiet():
            builder = datasets.load_dataset_builder(source.path, source.name)
        files = builder.config.data_files or {}
        return StreamedSource(source, tuple(files.get(source.split, ())), builder, source.split)
    local = _find_files(source.path)
    kind = str(_kind(local[0]))
    if kind == "text":
        return None
    names = [glob.escape(str(file.resolve())) for file in local]
    with quiet():
        builder = datasets.load_dataset_builder(kind, data_files=names)
    return StreamedSource(source, tuple(f"{file.name}: {file.stat().st_size}" for file in local), builder, "train")


def detect_format(source: DataSource, columns: list[str]) -> Format:
    """The source's format, after checking that its columns are there."""
    if source.path in ("passkey", "retrieval"):
        return source.path  # type: ignore[return-value]  # one of the two
    has_alpaca = {"instruction", "output"} <= set(columns)
    fits = {
        "chat": "messages" in columns or (source.format == "chat" and has_alpaca),
        "alpaca": has_alpaca,
        "text": (source.text_column or "text") in columns,
        "multiple_choice": set(CHOICE_COLUMNS) <= set(columns),
    }
    chosen: str = source.format
    if chosen == "auto":
        chosen = "text" if source.text_column else next((form for form, there in fits.items() if there), "auto")
    if not fits.get(chosen):
        needs = {
            "chat": "'messages', or 'instruction' and 'output'",
            "alpaca": "'instruction' and 'output'",
            "text": repr(source.text_column or "text"),
            "multiple_choice": ", ".join(map(repr, CHOICE_COLUMNS)),
        }
        expected = f"format {chosen} needs {needs[chosen]}" if chosen in needs else "no format for its columns"
        shown = ", ".join(repr(column) for column in columns if column != CONTINUES)
        raise UserError(
            f"{source.path}: {expected}; it has {shown}: rename them to {needs['alpaca']}, 'messages' or 'text', or"
            f" name the column of plain documents: --data {source.path},text_column=NAME"
        )
    return chosen  # type: ignore[return-value]


def _is_local(path: str) -> bool:
    """Whether `path` means files: it exists, or it cannot be the name of a hub data set."""
    named_like_hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is not None
    return Path(path).expanduser().exists() or _kind(Path(path)) is not None or not named_like_hub


def _kind(file: Path) -> str | None:
    """The `datasets` builder for a file: json, parquet, text, or None."""
    return SUFFIXES.get(Path(file.name.lower().removesuffix(".gz")).suffix)


def _find_files(path: str) -> list[Path]:
    place = Path(path).expanduser()
    if place.is_dir():
        names = [file for file in place.rglob("*") if _kind(file) is not None]
    else:
        names = [place] if place.is_file() else [Path(name) for name in glob.glob(str(place), recursive=True)]
    files = sorted(file for file in names if file.is_file())
    if not files:
        raise UserError(f"data file not found: {path} (no such file or pattern, or a folder without {READABLE})")
    kinds = {file: _kind(file) for file in files}
    for file, kind in kinds.items():
        if kind is None:
            raise UserError(f"cannot tell the format of {file} from its name: expected {READABLE}")
    if len(set(kinds.values())) > 1:
        mixed = " and ".join(sorted(map(str, set(kinds.values()))))
        raise UserError(f"{path} mixes {mixed} files: give them as separate sources")
    return files


def _read_files(source: DataSource, files: tuple[Path, ...], scratch: Path) -> datasets.Dataset:
    kind = str(_kind(files[0]))
    names = [glob.escape(str(file.resolve())) for file in files]
    options = {"sample_by": "document"} if kind == "text" else {}
    try:
        with quiet():
            data = datasets.load_dataset(kind, data_files=names, split="train", cache_dir=str(scratch), **options)
            if kind == "text":
                data = data.map(_paragraphs, batched=True, batch_size=1)
    except Exception as error:  # whatever reading raises concerns these files
        for file in files if kind == "json" else ():
            _check_json(file)
        cause = root_cause(error)
        if any(os.strerror(number) in cause for number in (errno.ENOSPC, errno.EDQUOT)):
            raise UserError(
                f"no room to unpack {source.path} in {scratch.parent} ({cause}); make some, or set LOLCATS_CACHE to a"
                " folder on another disk"
            ) from error
        raise UserError(f"cannot read {source.path}: {cause}") from error
    return data


def _paragraphs(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
    """A text file is one document; its paragraphs become rows, so that some can be the validation split.

    Every paragraph but the first keeps the blank line before it: joined, they are the file again.
    """
    texts: list[str] = []
    continues: list[bool] = []
    for text in batch["text"]:
        parts = re.split(r"(?<=\S)(?=[^\S\n]*\n[^\S\n]*\n\s*\S)", text.strip())
        texts += parts
        continues += [True] * (len(parts) - 1) + [False]
    return {"text": texts, CONTINUES: continues}


def _check_json(file: Path) -> None:
    """Name the first line or item of a file that `datasets` refused."""
    opener: Any = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    if text.strip() in ("", "[]"):
        raise UserError(f"{file} holds no rows")
    lines = {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    number, rows, unit = 1, {}, "item"
    try:
        value = json.loads(text)
        rows = dict(enumerate(value if isinstance(value, list) else [value], 1))
    except json.JSONDecodeError as whole:
        if whole.msg != "Extra data":  # one value, or the first line of several
            raise UserError(f"{file}, line {whole.lineno}: not valid JSON ({whole.msg})") from whole
        unit = "line"
        try:
            for number, line in lines.items():
                rows[number] = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{file}, line {number}: not valid JSON ({error.msg})") from error
    for number, row in rows.items():
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise UserError(f"{file}, {unit} {number}: expected an object with named columns, got a {kind}")


def _load_hub(source: DataSource) -> datasets.Dataset:
    with _hub_errors(source), quiet():
        return datasets.load_dataset(source.path, source.name, split=source.split)


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
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


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
