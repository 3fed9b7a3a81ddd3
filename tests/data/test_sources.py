import gzip
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest

from lolcats.config import DataSource
from lolcats.data import sources
from lolcats.data.sources import DEMO, detect_format, open_source
from lolcats.errors import UserError

ROWS = [{"text": "one"}, {"text": "two"}, {"text": "thrée\n\nthree"}]


def read(path: str | Path, **options) -> list[dict]:
    return open_source(DataSource(path=str(path), **options)).rows().to_list()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.gz", "a [1] b.jsonl"])
def test_files_of_rows(tmp_path: Path, write_rows, name: str) -> None:
    for _ in range(2):  # unpacked, and from the cache
        assert read(write_rows(name, ROWS)) == ROWS
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ROWS


@pytest.mark.parametrize("packed", [False, True])
def test_text_file_becomes_paragraphs_that_join_to_the_file(tmp_path: Path, packed: bool) -> None:
    text = "# Title\n\nFirst line,\nsecond line.\n \n\n  Indented.\n\n\n\nLast."
    file = tmp_path / ("a.txt.gz" if packed else "a.txt")
    data = f"\n{text}\n\n".encode()
    file.write_bytes(gzip.compress(data) if packed else data)
    rows = read(file)
    assert "".join(row["text"] for row in rows) == text
    paragraphs = [row["text"].strip() for row in rows]
    assert paragraphs == ["# Title", "First line,\nsecond line.", "Indented.", "Last."]
    assert [row["_continues"] for row in rows] == [True, True, True, False]


def test_folder_and_pattern_are_read_in_order(tmp_path: Path, write_rows) -> None:
    write_rows("data/b/2.jsonl", ROWS[1:2])
    write_rows("data/a.jsonl.gz", ROWS[:1])
    write_rows("data/b/3.jsonl", ROWS[2:])
    (tmp_path / "data/README.md").write_text("not data")
    assert read(tmp_path / "data") == ROWS
    assert read(tmp_path / "data" / "b" / "*.jsonl") == ROWS[1:]


def test_max_rows_and_fingerprint(write_rows) -> None:
    path = write_rows("a.jsonl", ROWS)
    assert read(path, max_rows=2) == ROWS[:2]
    first = open_source(DataSource(path=path)).fingerprint
    assert open_source(DataSource(path=path)).fingerprint == first
    write_rows("a.jsonl", [*ROWS[:2], ROWS[1]])
    assert open_source(DataSource(path=path)).fingerprint != first


def test_demo_text_is_shipped_with_its_attribution(tmp_path: Path) -> None:
    rows = open_source(DataSource(path="demo")).rows()
    assert len(rows) > 400
    assert sum(map(len, rows["text"])) > 2_000_000
    assert detect_format(DataSource(path="demo"), rows.column_names) == "text"
    assert sum(file.stat().st_size for file in DEMO.iterdir()) < 2 * 2**20
    attribution = (DEMO / "ATTRIBUTION.md").read_text()
    assert all(source.split(":")[0] in attribution for source in rows["source"])
    assert len(open_source(DataSource(path="demo", max_rows=3)).rows(evaluation=True)) == 3
    assert not set(rows["source"][:200]) & set(rows["source"][200:])


@pytest.mark.parametrize(
    ("columns", "options", "expected"),
    [
        (["messages", "text"], {}, "chat"),
        (["instruction", "output", "text"], {}, "alpaca"),
        (["text", "output"], {}, "text"),
        (["body", "messages"], {"text_column": "body"}, "text"),
        (["instruction", "output"], {"format": "chat"}, "chat"),
        (["conversations", "system"], {}, "chat"),
        (["prompt", "completion"], {}, "prompt"),
        (["question", "answer"], {}, "alpaca"),
        (["instruction", "context", "response"], {}, "alpaca"),
        (["instruction", "output", "text"], {"format": "text"}, "text"),
    ],
)
def test_format_from_columns(columns, options, expected: str) -> None:
    assert detect_format(DataSource(path="x", **options), columns) == expected


@pytest.mark.parametrize(
    ("columns", "options", "complaint"),
    [
        (["a", "b"], {}, "no format for its columns; it has 'a', 'b'"),
        (["a"], {"text_column": "body"}, "format text needs 'body'; it has 'a'"),
        (["a"], {"format": "text"}, "needs 'text'; it has 'a'"),
        (["instruction"], {"format": "alpaca"}, "needs 'instruction' and 'output', .*it has 'instruction'"),
        (["text"], {"format": "chat"}, "needs 'messages'.*it has 'text'"),
    ],
)
def test_missing_columns(columns, options, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        detect_format(DataSource(path="x", **options), columns)


@pytest.mark.parametrize("name", ["absent.jsonl", "/absent/folder", "absent/*.jsonl", "~/absent.txt.gz"])
def test_file_not_found(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="data file not found: "):
        open_source(DataSource(path=name))


def test_unknown_kinds_of_files(tmp_path: Path, write_rows) -> None:
    (tmp_path / "a.xlsx").write_text("x")
    (tmp_path / "empty").mkdir()
    write_rows("mixed/a.jsonl", ROWS)
    (tmp_path / "mixed/a.txt").write_text("x")
    write_rows("columns/a.jsonl", [{"text": "x"}])
    write_rows("columns/b.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
    for name, complaint in (
        ("a.xlsx", r"cannot tell the format of .*a\.xlsx"),
        ("empty", r"data file not found: .* a folder without"),
        ("mixed", "mixes json and text files"),
        ("columns", "its files differ in their columns"),
    ):
        with pytest.raises(UserError, match=complaint):
            open_source(DataSource(path=str(tmp_path / name)))


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": "y"}\n{"text": \n', r"cannot read .*a\.jsonl: .* in row 2"),
        ("a.json", b'[{"text": "x"},\n{"text" "y"}]', r"cannot read .*a\.json: .*No ':' found"),
        ("a.jsonl", b"", r"a\.jsonl: it holds no rows"),
        ("a.jsonl.gz", b"not gzip", r"cannot read .*a\.jsonl\.gz: "),
        ("a.parquet", b"not parquet", r"cannot read .*a\.parquet: "),
        ("a.jsonl", b'"x"\n"y"\n', r"cannot read .*a\.jsonl: .* in row 0"),
        *(
            (f"a.{kind}", b'{"text": "x"}\n{"text": "\xe9"}', r"can't decode byte 0xe9")
            for kind in ("json", "csv", "txt")
        ),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_tables(tmp_path: Path, name: str) -> None:
    comma = "\t" if name == "a.tsv" else ","
    text = 'text,n\n"two\nlines, one ""cell""",1\nNone,\nnull,3\n'.replace(",", comma)
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    rows = read(tmp_path / name)
    assert [row["text"] for row in rows] == [f'two\nlines{comma} one "cell"', "None", "null"]
    assert [row["n"] for row in rows] == ["1", None, "3"]


def test_rows_with_more_commas_than_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("instruction,output\n" + "a,b, c\n" * 3)
    with pytest.raises(UserError, match="more columns than the first line"):
        read(tmp_path / "a.csv")


def test_columns_may_come_late_and_be_of_any_type(tmp_path: Path, write_rows) -> None:
    """What Arrow would refuse with types from the first 10 MB."""
    rows = [{"text": "x" * 1000, "late": None, "other": n} for n in range(11_000)]
    rows += [{"text": "end", "late": "here", "other": ["any", {"thing": 1}], "instruction": "i"}]
    found = read(write_rows("a.jsonl", rows))
    assert found[-1] == rows[-1]
    assert len(found) == len(rows)


def test_nested_values_stay_as_they_are(tmp_path: Path, write_rows) -> None:
    rows = [{"messages": [{"role": "user", "content": part, "extra": {part: 1}}]} for part in ("a", "b")]
    rows[1]["messages"][0]["content"] = [{"type": "text", "text": "b"}]
    assert read(write_rows("a.jsonl", rows)) == rows


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "test.jsonl"),
        ("train/a.jsonl", "test/a.jsonl"),
        ("data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"),
    ],
)
def test_splits_of_local_folders(tmp_path: Path, write_rows, names) -> None:
    for number, name in enumerate(names):
        write_rows(f"[some] data/{name}", ROWS[number : number + 1])
    write_rows("[some] data/.ipynb_checkpoints/train.jsonl", ROWS)
    write_rows("[some] data/.train.jsonl", ROWS)
    (tmp_path / "[some] data/train_notes.md").write_text("")
    folder = tmp_path / "[some] data"
    assert read(folder) == ROWS[:1]
    assert read(folder, split="test") == ROWS[1:2]
    with pytest.raises(UserError, match="has no split 'validation', only 'train', 'test'"):
        read(folder, split="validation")
    with pytest.raises(UserError, match="has no split 'test', only 'train'"):
        read(folder / names[1], split="test")


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path / "two")
    assert read(tmp_path / "one") == read(tmp_path / "two") == ROWS
    assert read(tmp_path / "two", split="test") == ROWS[1:2]
    with pytest.raises(UserError, match="has no split 'test', only 'train'"):
        read(tmp_path / "one", split="test")


def test_hub_data_sets(monkeypatch, tmp_path: Path) -> None:
    load = Mock(return_value=datasets.Dataset.from_list(ROWS))
    monkeypatch.setattr(sources.datasets, "load_dataset", load)
    opened = open_source(DataSource(path="some/name", name="sub", split="test", max_rows=1))
    load.assert_called_once_with("some/name", "sub", split="test")
    assert opened.rows().to_list() == ROWS[:1]
    assert opened.fingerprint

    wrapped = RuntimeError("wrapped")
    wrapped.__cause__ = ConnectionError("name resolution failed")
    monkeypatch.setattr(sources.datasets, "load_dataset", Mock(side_effect=wrapped))
    with pytest.raises(UserError, match="from the hub: ConnectionError: name resolution failed: check the conn"):
        open_source(DataSource(path="some/name"))
