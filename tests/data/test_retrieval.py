"""Retrieval texts: their length, what they ask for, and that the two splits share nothing."""

import numpy as np
import pytest

from lolcats.config import DataSection
from lolcats.data import build_datasets
from lolcats.data.retrieval import COPY_PREFIX, FACTS, KINDS, LOOK_UPS, MOST_LABELS, RetrievalWriter, retrieval_dataset
from lolcats.errors import UserError


@pytest.fixture(scope="module")
def writers(byte_tokenizer, haystack):
    return {split: RetrievalWriter(byte_tokenizer, split, haystack) for split in ("train", "test")}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("kind", [*KINDS, "needles_8", FACTS])
def test_answers_stand_in_the_text_before(writers, tokenizer, split, kind):
    length = 2048
    for index in range(3):
        sample = writers[split].write(kind, length, 0, index)
        again = writers[split].write(kind, length, 0, index)
        other = writers[split].write(kind, length, 1, index)
        assert len(sample.token_ids) == len(sample.answer) == length
        assert np.array_equal(sample.token_ids, again.token_ids)
        assert not np.array_equal(sample.token_ids, other.token_ids)
        for number in range(sample.answer.max() + 1):  # sources are where the answers stand
            answer, source = (np.flatnonzero(numbers == number) for numbers in (sample.answer, sample.source))
            assert source[-1] < answer[0]
            before = np.arange(-COPY_PREFIX, 0)  # the same question, or what is being copied
            found, expected = (np.r_[x[0] + before, x] for x in (source, answer))
            assert np.array_equal(sample.token_ids[found], sample.token_ids[expected])
        if kind.startswith("copy"):
            count = int(kind.partition("_")[2])
            assert np.array_equal(sample.token_ids[-count:], sample.token_ids[-2 * count : -count])
            assert (sample.answer >= 0).sum() == sample.answer.max() + 1 == count - COPY_PREFIX
            continue
        first = int((sample.answer >= 0).argmax())
        before = tokenizer.decode(sample.token_ids[:first])
        answers = [tokenizer.decode(sample.token_ids[sample.answer == n]) for n in range(sample.answer.max() + 1)]
        assert len(answers) == (8 if kind == FACTS else 1 if kind.startswith("needle") else LOOK_UPS)
        assert all(answer.strip() in before for answer in answers), answers


def test_the_fact_that_is_asked_for_is_one_of_several(writers, tokenizer):
    sample = writers["test"].write("needles", 2048, 0, 0)
    text = tokenizer.decode(sample.token_ids)
    wordings = ("the password for room ", "In the archive, ", "They agreed to call ")
    assert sum(text.count(wording) for wording in wordings) == 4


def test_the_splits_share_neither_words_nor_text(writers):
    train, test = writers["train"], writers["test"]
    assert set(train.words).isdisjoint(test.words)
    assert min(len(train.words), len(test.words)) > 1000
    assert len(test.text) < len(train.text)
    samples = {name: writer.write("pairs", 1024, 0, 0).token_ids for name, writer in writers.items()}
    assert not np.array_equal(samples["train"], samples["test"])


def test_training_mixes_all_kinds(writers):
    samples = [writers["train"].write_any(1024, 0, index) for index in range(40)]
    assert all(len(sample.token_ids) == 1024 for sample in samples)
    numbers = {int(sample.answer.max()) + 1 for sample in samples}
    assert {1, LOOK_UPS} < numbers
    assert max(numbers) > 50


def test_what_does_not_fit_is_refused(writers):
    for kind in ("needles", "phone_book", "copy_100"):
        with pytest.raises(UserError, match="raise the length"):
            writers["test"].write(kind, 150, 0, 0)
    with pytest.raises(UserError, match="give more text"):
        writers["test"].write("needle", 10**6, 0, 0)
    with pytest.raises(ValueError, match="expected one of needle"):
        writers["test"].write("needl", 1024, 0, 0)


def test_as_training_data(tokenizer, haystack):
    source = {"path": "retrieval", "haystack": haystack, "max_rows": 6, "seed": 4}
    section = DataSection(sources=[source], sequence_length=1024, validation_rows=2)
    train, validation = build_datasets(section, tokenizer, seed=0, progress=False)
    assert (train.input_ids.shape, validation.input_ids.shape) == ((4, 1024), (2, 1024))
    written = [RetrievalWriter(tokenizer, "train", haystack).write_any(1024, 4, index) for index in range(6)]
    packed = [*validation.input_ids, *train.input_ids], [*validation.label_mask, *train.label_mask]
    for sample, ids, labels in zip(written, *packed, strict=True):
        assert np.array_equal(sample.token_ids, ids)
        assert np.array_equal(sample.answer >= 0, labels)
    everything = section.model_copy(update={"loss_on": "all"})
    assert build_datasets(everything, tokenizer, seed=0, progress=False)[0].label_mask[:, 1:].all()


def test_texts_for_gates(tokenizer, haystack):
    settings = {"length": 1024, "seed": 0}
    data = retrieval_dataset(tokenizer, haystack, count=20, **settings)
    labels = data.label_mask.sum(1)
    assert (labels > 0).all()
    assert labels.max() == MOST_LABELS
    later = retrieval_dataset(tokenizer, haystack, count=5, first=15, **settings)
    assert np.array_equal(later.input_ids, data.input_ids[15:])
    assert later.info["fingerprint"] != data.info["fingerprint"]
    asked = retrieval_dataset(tokenizer, haystack, count=2, kind=FACTS, **settings)
    written = RetrievalWriter(tokenizer, "train", haystack).write(FACTS, 1024, 0, 1)
    assert np.array_equal(asked.input_ids[1], written.token_ids)
    assert np.array_equal(asked.label_mask[1], written.answer >= 0)
