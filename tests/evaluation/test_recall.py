"""Recall and RULER: what counts as found, and texts that any tokenizer and any haystack give."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from rich.progress import Progress
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lolcats.config import DataSection, DataSource
from lolcats.data import build_evaluation_dataset
from lolcats.data.retrieval import KINDS, TEMPLATES, RetrievalWriter, haystack_text
from lolcats.data.sources import open_source
from lolcats.data.splits import training_and_validation
from lolcats.errors import UserError
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
    for item in found:
        tenths = [share for share in item["depths"] if share is not None]
        assert len(item["depths"]) == 10
        assert 0 < len(tenths) <= 3 if item["kind"].startswith("needle") else len(tenths) >= 1
        assert set(tenths) == {1.0}
    last = recall_accuracy(Oracle(lambda ids: [LENGTH - 1]), tokenizer, **lengths)
    expected = {"needle": 0, "needles": 0, "phone_book": 5 / 6, "pairs": 5 / 6}
    expected |= {f"copy_{count}": 1 - 1 / (count - 4) for count in (100, 400, 900)}
    assert {item["kind"]: item["accuracy"] for item in last} == pytest.approx(expected)
    # a token before the first answer is no answer
    before = recall_accuracy(Oracle(lambda ids: range(1, 200)), tokenizer, **lengths)
    assert [item["accuracy"] for item in before] == [1.0] * len(KINDS)


def test_depths_are_where_the_answers_stand(tokenizer, haystack):
    writer = RetrievalWriter(tokenizer, "test", haystack, begin_token=True)
    samples = [writer.write("needle", LENGTH, 0, index) for index in range(20)]
    tenths = [int((sample.source == 0).argmax() * 10 // LENGTH) for sample in samples]
    late = {tuple(sample.token_ids.tolist()) for sample, tenth in zip(samples, tenths, strict=True) if tenth >= 5}
    forgets = Oracle(lambda ids: [LENGTH - 1] if tuple(ids.tolist()) in late else [])
    (item,) = recall_accuracy(forgets, tokenizer, kinds=("needle",), lengths=(LENGTH,), samples=20, haystack=haystack)
    assert item["depths"] == [None if n not in tenths else float(n < 5) for n in range(10)]
    assert len(set(tenths)) > 5


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


@pytest.fixture(scope="module")
def word_tokenizer():
    plain = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", unk_token="<unk>")


def test_ruler_without_a_network(word_tokenizer, haystack, monkeypatch):
    pytest.importorskip("wonderwords", reason="lolcats[eval] is not installed")
    from lolcats.evaluation import ruler
    from lolcats.evaluation.ruler import METRIC, RULER_TASKS, ruler_tasks

    tasks = ruler_tasks(word_tokenizer, lengths=(1024, 2048), samples=2, haystack=haystack, seed=0)
    assert list(tasks) == [(name, length) for name in RULER_TASKS for length in (1024, 2048)]
    sentences = haystack_text(haystack, "test").split(". ")
    for (name, length), task in tasks.items():
        rows = list(task.test_docs())
        assert len(rows) == 2
        for row in rows:
            tokens = len(word_tokenizer(task.doc_to_text(row))["input_ids"])
            assert 0.3 * length < tokens <= length, (name, length)
            assert all(answer in row["input"] for answer in row["outputs"])
            wrong = [answer[::-1] + "#" for answer in row["outputs"]]
            for said, share in ((row["outputs"], 1.0), (row["outputs"][:1], 1 / len(row["outputs"])), (wrong, 0.0)):
                assert task.process_results(row, [", ".join(said).upper()])[METRIC] == pytest.approx(share)
        if name in ("niah_single_2", "niah_multikey_1"):
            assert rows[0]["input"][:300] != rows[1]["input"][:300]  # not all of the same article
            assert any(sentence in rows[0]["input"] for sentence in sentences)
    needle = {"special", "magic", "mentioned", "provided"}
    for fact, question in TEMPLATES["train"]["facts"]:
        assert not needle & set(f"{fact} {question}".lower().split())
    few = ("niah_single_2", "ruler_cwe")
    monkeypatch.setattr(ruler, "RULER_TASKS", few)
    again, other = (
        ruler_tasks(word_tokenizer, lengths=(1024,), samples=2, haystack=haystack, seed=seed) for seed in (0, 1)
    )
    short = {key: task for key, task in tasks.items() if key in again}
    assert len(short) == len(few)
    inputs = [[[row["input"] for row in task.test_docs()] for task in one.values()] for one in (short, again, other)]
    assert inputs[0] == inputs[1]
    assert all(first != second for first, second in zip(inputs[0], inputs[2], strict=True))


def test_ruler_that_does_not_fit_is_refused(word_tokenizer, haystack, monkeypatch):
    pytest.importorskip("wonderwords", reason="lolcats[eval] is not installed")
    from lolcats.evaluation import ruler
    from lolcats.evaluation.ruler import ruler_tasks

    with pytest.raises(UserError, match="niah_single_1 does not fit into 150 tokens"):
        ruler_tasks(word_tokenizer, lengths=(150,), samples=1, seed=0, haystack=haystack)
    for name in ("ruler_vt", "ruler_cwe"):
        monkeypatch.setattr(ruler, "RULER_TASKS", (name,))
        with pytest.raises(UserError, match=f"{name} does not fit into 300 tokens"):
            ruler_tasks(word_tokenizer, lengths=(300,), samples=1, seed=0, haystack=haystack)
    monkeypatch.setattr(ruler, "RULER_TASKS", ("ruler_vt",))
    with pytest.raises(UserError, match="example takes more than the 500"):
        ruler_tasks(lambda text: {"input_ids": list(text)}, lengths=(9000,), samples=1, seed=0, haystack=haystack)
