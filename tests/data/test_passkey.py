"""Passkey texts, and the data source that generates them."""

from __future__ import annotations

import numpy as np
import pytest

from lolcats.config import DataSection
from lolcats.data import build_datasets
from lolcats.data.passkey import PasskeyWriter, compose, draw
from lolcats.errors import UserError


def test_the_papers_text():
    assert compose(12345, 0.5, 4).split("\n") == [
        "There is an important piece of info hidden inside a lot of irrelevant text. Find it and memorize it. I will "
        "quiz you about the important information there.",
        "The grass is green. The sky is blue.",
        "The pass key is 12345. Remember it. 12345 is the pass key.",
        "The grass is green. The sky is blue.",
        "What is the pass key? The pass key is",
    ]
    assert "Here we go. There and back again. The grass is green." in compose(1, 0.0, 7)


def test_drawn_passkeys():
    rows = draw(200, seed=1)
    assert all(10_000 <= row["passkey"] <= 99_999 for row in rows)
    assert {int(10 * row["depth"]) for row in rows} == set(range(10))
    assert draw(50, seed=1) == rows[:50]
    assert draw(5, seed=2) != rows[:5]


@pytest.mark.parametrize(("length", "depth"), [(330, 0.0), (512, 0.4), (777, 1.0)])
def test_texts_are_as_long_as_fits(tokenizer, length, depth):
    writer = PasskeyWriter(tokenizer)
    sample = writer.write(54321, depth, length)
    tokens = len(tokenizer(sample.prompt + sample.answer)["input_ids"])
    assert sample.tokens + 6 == tokens <= length
    assert tokens > length - 23  # not even the longest sentence fits any more
    with pytest.raises(UserError, match="raise the length"):
        writer.write(54321, depth, 100)


def section(length: int, **source) -> DataSection:
    sources = [{"path": "passkey", "max_rows": 12, **source}]
    return DataSection.model_validate({"sources": sources, "sequence_length": length, "validation_rows": 2})


def test_as_training_data(tokenizer):
    train, validation = build_datasets(section(400), tokenizer, seed=0, progress=False)
    assert (len(train), len(validation)) == (10, 2)
    for ids, labels in zip(train.input_ids, train.label_mask, strict=True):
        text = tokenizer.decode(ids)
        body = text.lstrip("<|eos>")
        assert body.startswith("There is an important")
        assert body.endswith("<|eos|>")  # one sample is one sequence
        answer = tokenizer.decode(ids[labels])
        assert answer[0] == " "
        assert answer[6:] == "<|eos|>"
        assert text.count(answer[1:6]) == 3
    whole = np.concatenate([validation.input_ids, train.input_ids])
    passkeys = [tokenizer.decode(ids[-7:-1]).strip() for ids in whole]
    assert passkeys == [str(row["passkey"]) for row in draw(12, seed=0)]
