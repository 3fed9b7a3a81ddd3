"""Passkey texts, and the data source that generates them."""

import numpy as np
import pytest

from lolcats.config import DataSection
from lolcats.data import build_datasets
from lolcats.data.retrieval import RetrievalWriter
from lolcats.errors import UserError


@pytest.mark.parametrize("length", [400, 2000])
def test_the_papers_text(tokenizer, length):
    writer = RetrievalWriter(tokenizer, "test")
    samples = [writer.write("passkey", length, 0, index) for index in range(20)]
    depths = []
    for sample in samples:
        assert len(sample.token_ids) == length
        task, before, fact, after, question = tokenizer.decode(sample.token_ids).split("\n")
        answer = tokenizer.decode(sample.token_ids[sample.answer == 0])
        number = int(answer)
        assert answer == f" {number}"
        assert 10_000 <= number < 100_000
        assert task.startswith("There is an important piece of info hidden inside a lot of irrelevant text.")
        assert fact == f"The pass key is {number}. Remember it. {number} is the pass key."
        assert question == f"What is the pass key? The pass key is {number}"
        for filler in (before, after):  # it starts anew after the number
            assert ("The grass is green. The sky is blue. The sun is yellow. Here we go. " * 99).startswith(filler[:50])
        depths.append(len(before) / len(before + after))
        assert f"{number}".startswith(tokenizer.decode(sample.token_ids[sample.source == 0]).strip()[:2])
    assert depths == pytest.approx([(n % 10 + 0.5) / 10 for n in range(20)], abs=0.05 + 30 / length)
    assert len({tuple(sample.token_ids[sample.answer == 0]) for sample in samples}) == 20
    with pytest.raises(UserError, match="raise the length"):
        writer.write("passkey", 100, 0, 0)


def test_as_training_data(tokenizer):
    sources = [{"path": "passkey", "max_rows": 12}]
    section = DataSection.model_validate({"sources": sources, "sequence_length": 400, "validation_rows": 2})
    train, validation = build_datasets(section, tokenizer, seed=0, progress=False)
    assert (len(train), len(validation)) == (10, 2)
    answers = set()
    for ids, labels in zip(train.input_ids, train.label_mask, strict=True):
        text, answer = tokenizer.decode(ids), tokenizer.decode(ids[labels])
        assert text.startswith("There is an important")
        assert text.endswith(answer)  # one sample is one sequence
        assert text.count(answer) == 3 - text.count(f"\n{answer.strip()}")
        answers.add(answer)
    assert len(answers) == 10
    writer = RetrievalWriter(tokenizer, "test")
    tests = {tokenizer.decode(writer.write("passkey", 400, 0, n).token_ids)[-5:] for n in range(10)}
    assert not tests & {answer.strip() for answer in answers}
    assert np.array_equal(validation.label_mask.sum(1) > 0, [True, True])
