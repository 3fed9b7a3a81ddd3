"""Recall: what counts as found, and which texts are written."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from rich.progress import Progress

from lolcats.config import DataSection, DataSource
from lolcats.data import build_evaluation_dataset
from lolcats.data.retrieval import KINDS, haystack_text
from lolcats.data.sources import open_source
from lolcats.data.splits import training_and_validation
from lolcats.evaluation.recall import recall_accuracy

LENGTH = 2048


@pytest.fixture(scope="module")
def haystack(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    draw = random.Random(0)
    words = ["river", "stone", "north", "lamp", "said", "went", "under", "a", "the", "of"]
    sentences = [" ".join(draw.choice(words) for _ in range(9)) + "." for _ in range(4000)]
    file.write_text("\n".join(json.dumps({"text": " ".join(sentences[n : n + 40])}) for n in range(0, 4000, 40)))
    return str(file)


class Oracle:
    """Predicts every next token, but those at the positions that `forgets` picks in a text."""

    device = torch.device("cpu")

    def __init__(self, forgets=lambda ids: []):
        self.forgets = forgets

    def __call__(self, input_ids, use_cache, logits_to_keep):
        following = input_ids.roll(-1, 1)
        for row, ids in zip(following, input_ids, strict=True):
            for place in self.forgets(ids):
                row[place - 1] += 1
        return SimpleNamespace(logits=torch.nn.functional.one_hot(following[:, -logits_to_keep:], 400))


def test_answers_count_whole_and_copies_by_the_token(tokenizer, haystack):
    lengths = {"lengths": (LENGTH,), "samples": 3, "haystack": haystack}
    found = recall_accuracy(Oracle(), tokenizer, **lengths)
    assert [item["kind"] for item in found] == list(KINDS)
    assert all(item["accuracy"] == 1 and item["stderr"] == 0 for item in found)
    last = recall_accuracy(Oracle(lambda ids: [LENGTH - 1]), tokenizer, **lengths)
    expected = {"needle": 0, "needles": 0, "phone_book": 5 / 6, "pairs": 5 / 6}
    expected |= {f"copy_{count}": 1 - 1 / (count - 4) for count in (100, 400, 900)}
    assert {item["kind"]: item["accuracy"] for item in last} == pytest.approx(expected)
    # a token before the first answer is no answer
    before = recall_accuracy(Oracle(lambda ids: range(1, 200)), tokenizer, **lengths)
    assert [item["accuracy"] for item in before] == [1.0] * len(KINDS)


def test_the_default_text_is_never_trained_on(tokenizer):
    rows = open_source(DataSource(path="demo")).rows()["text"]
    test, train = (haystack_text("demo", split) for split in ("test", "train"))
    held_out = [text for text in rows if text in test]
    assert len(held_out) == 200
    assert not any(text in train for text in held_out)
    opened = [open_source(DataSource(path="demo", validation_rows=20))]
    config = DataSection(sources=[opened[0].source], sequence_length=100_000)
    found = training_and_validation(config, opened, tokenizer, 0, Progress(disable=True))
    assert [part.info["sources"][0]["rows"] for part in found] == [len(rows) - 200, 20]
    evaluated = build_evaluation_dataset(config, tokenizer, progress=False)
    assert evaluated.info["sources"][0]["rows"] == 200


def test_what_is_too_long_for_a_text_is_left_out(tokenizer, haystack):
    settings = {"kinds": ("copy_100", "copy_900"), "lengths": (512, LENGTH), "haystack": haystack}
    found = [(item["kind"], item["length"]) for item in recall_accuracy(Oracle(), tokenizer, **settings)]
    assert found == [("copy_100", 512), ("copy_100", LENGTH), ("copy_900", LENGTH)]
