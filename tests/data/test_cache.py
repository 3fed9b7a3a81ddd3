from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from lolcats.data import cache
from lolcats.data.packed import PackedDataset


def example() -> PackedDataset:
    ids = np.arange(6, dtype=np.int32).reshape(2, 3)
    return PackedDataset(ids, ids % 2 == 1, {"tokens": 6, "é": [1]})


def test_absent_and_damaged_entries_are_not_loaded(tmp_path: Path, caplog) -> None:
    directory = tmp_path / "x"
    assert cache.load(directory, ("train",)) is None
    cache.save(directory, {"train": example()})
    file = directory / "train-input_ids.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    with caplog.at_level(logging.WARNING):
        assert cache.load(directory, ("train",)) is None
    assert "damaged data cache" in caplog.text
    with file.open("wb") as stream:
        np.save(stream, np.zeros((1, 3), np.int32))
    assert cache.load(directory, ("train",)) is None
    (directory / "train.json").write_text("{")
    assert cache.load(directory, ("train",)) is None
    assert cache.save(directory, {"train": example()})
    assert cache.load(directory, ("train",)) is not None


def test_tokenizer_hash_depends_on_content_and_not_on_use(new_tokenizer) -> None:
    used = new_tokenizer()
    used.pad_token = "<|end|>"
    before = cache.tokenizer_hash(used)
    used(["abc", "d"], padding="max_length", truncation=True, max_length=2, return_tensors="np")
    assert used.backend_tokenizer.truncation is not None
    assert cache.tokenizer_hash(used) == before
    before = cache.tokenizer_hash(new_tokenizer())
    assert cache.tokenizer_hash(new_tokenizer()) == before
    assert cache.tokenizer_hash(new_tokenizer(eos="<|end|>")) != before
    assert cache.tokenizer_hash(new_tokenizer(chat_template="x")) != before
    extended = new_tokenizer()
    extended.add_tokens(["word"])
    assert cache.tokenizer_hash(extended) != before
