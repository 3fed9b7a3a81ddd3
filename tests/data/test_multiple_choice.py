"""Multiple-choice questions as five-shot samples."""

from __future__ import annotations

import re

import pytest
from datasets import Dataset

from lolcats.config import DataSection
from lolcats.data import build_datasets
from lolcats.data.templates import few_shot
from lolcats.errors import UserError


def rows(count: int, **changes):
    return [
        {
            "id": str(index),
            "question": f"Where is number {index}? ",
            "question_concept": "number",
            "choices": {"label": list("ABCDE"), "text": [f"place {index}{letter}" for letter in "vwxyz"]},
            "answerKey": "ABCDE"[index % 5],
            **changes,
        }
        for index in range(count)
    ]


def test_five_questions_in_mmlus_form():
    samples = few_shot(Dataset.from_list(rows(8)), seed=0)
    assert len(samples) == 8
    for index, sample in enumerate(samples):
        header, *blocks = sample["prompt"].split("\n\n")
        assert header == "The following are multiple choice questions (with answers) about common sense."
        assert len(blocks) == 5
        assert blocks[-1] == (
            f"Where is number {index}?\nA. place {index}v\nB. place {index}w\nC. place {index}x\n"
            f"D. place {index}y\nE. place {index}z\nAnswer:"
        )
        assert sample["answer"] == f" {'ABCDE'[index % 5]}"
        numbers = [int(re.match(r"Where is number (\d+)", block)[1]) for block in blocks]
        assert len(set(numbers)) == 5  # no question twice, not even its own
        for number, block in zip(numbers[:-1], blocks[:-1], strict=True):
            assert block.endswith(f"Answer: {'ABCDE'[number % 5]}")


def test_as_training_data(tokenizer, write_rows):
    path = write_rows("cqa.jsonl.gz", rows(30))
    data = DataSection.model_validate({"sources": [{"path": path}], "sequence_length": 1024, "validation_rows": 6})
    train, validation = build_datasets(data, tokenizer, seed=0, progress=False)
    assert train.info["sources"][0]["format"] == "multiple_choice"
    assert validation.info["sources"][0]["documents"] == 6
    text = tokenizer.decode(train.input_ids.flatten())
    assert text.startswith("The following are multiple choice questions")
    learnt = tokenizer.decode(train.input_ids[train.label_mask])
    assert re.fullmatch(r"( [A-E]<\|eos\|>)+.{0,2}", learnt)
    # Validation questions are nobody's examples in training, and the other way round.
    shown = {int(number) for number in re.findall(r"number (\d+)\?", text)}
    assert shown <= set(range(6, 30))
    held_out = tokenizer.decode(validation.input_ids.flatten())
    assert {int(number) for number in re.findall(r"number (\d+)\?", held_out)} <= set(range(6))


@pytest.mark.parametrize(
    ("changes", "count", "message"), [({}, 4, "only 4 rows"), ({"answerKey": ""}, 6, "answerKey '' is none")]
)
def test_data_that_does_not_do(changes, count, message):
    with pytest.raises(UserError, match=message):
        few_shot(Dataset.from_list(rows(count, **changes)), seed=0)
