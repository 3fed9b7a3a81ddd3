"""Loading any model, and perplexity of packed sequences and of whole documents by position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lolcats.config import DataSection, ModelSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.data import PackedDataset, build_evaluation_dataset
from lolcats.errors import UserError
from lolcats.evaluation import perplexity as evaluation
from lolcats.evaluation.load import load_model
from lolcats.evaluation.perplexity import dataset_perplexity, document_perplexity, windows
from lolcats.modeling.loading import load_base_model


@pytest.fixture
def linearized(model_dir):
    base, tokenizer = load_base_model(ModelSection(path=str(model_dir), device="cpu"))
    return convert(base, AttentionConfig(window_size=2)), tokenizer


def test_a_base_model(model_dir):
    model, tokenizer = load_model(model_dir, device="cpu", dtype="bfloat16")
    assert (model.config.model_type, model.dtype) == ("llama", torch.bfloat16)
    assert tokenizer("w0")["input_ids"] == [2]


def test_perplexity_is_the_exponential_of_the_mean_loss(linearized, data_file, tmp_path, monkeypatch):
    monkeypatch.setenv("LOLCATS_CACHE", str(tmp_path))
    model, tokenizer = linearized
    section = DataSection.model_validate(
        {"sources": [{"path": str(data_file), "max_rows": 8}], "sequence_length": 16, "loss_on": "all"}
    )
    packed = build_evaluation_dataset(section, tokenizer)
    result = dataset_perplexity(model, packed, batch_size=2)
    assert result["perplexity"] == pytest.approx(torch.tensor(result["loss"]).exp().item(), rel=1e-6)
    again = dataset_perplexity(model, packed, batch_size=5)
    assert again["tokens"] == result["tokens"] > 0
    assert again["loss"] == pytest.approx(result["loss"], rel=1e-5)  # other batches, other order of addition


def test_data_without_labels_have_no_perplexity(linearized):
    """Not 1.0, the exponential of no loss at all."""
    ids = np.zeros((2, 8), dtype=np.int32)
    with pytest.raises(UserError, match=r"none of the 2 sequences has a label.*--loss-on all"):
        dataset_perplexity(linearized[0], PackedDataset(ids, np.zeros(ids.shape, dtype=np.bool_)))


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("/no/such/folder", {}, "not found"),
        ("MODEL", {"dtype": "int8"}, r"model\.dtype"),
        ("MODEL", {"device": "toaster"}, "toaster"),
    ],
)
def test_mistakes(model_dir, path, options, message):
    with pytest.raises(UserError, match=message):
        load_model(model_dir if path == "MODEL" else path, **options)


# --- whole documents ----------------------------------------------------------------------------------------------

GENERATOR = np.random.default_rng(4)


def document(length: int, every: int = 1):
    labels = np.arange(length) % every == 0
    return GENERATOR.integers(1, 320, length).astype(np.int32), labels


@pytest.mark.parametrize(("max_length", "stride"), [(10, 10), (10, 3), (7, 5), (100, 100), (100, 2)])
def test_every_token_but_the_first_is_scored_once(max_length, stride):
    lengths = [1, 2, 10, 11, 25, 33]
    scored = {(w.document, place) for w in windows(lengths, max_length, stride) for place in range(w.first, w.end)}
    # A token at the beginning of a window has nothing before it; only windows that overlap reach it.
    borders = (
        {(d, p) for d, n in enumerate(lengths) for p in range(stride, n, stride)} if max_length == stride else set()
    )
    assert scored == {(d, p) for d, n in enumerate(lengths) for p in range(1, n)} - borders
    assert len(scored) == sum(w.end - w.first for w in windows(lengths, max_length, stride))
    assert all(w.end - w.begin <= max_length for w in windows(lengths, max_length, stride))


@torch.no_grad()
def expected_losses(model, ids, max_length, stride):
    """Losses by place in the document, each window in a forward pass of its own."""
    losses = {}
    for w in windows([len(ids)], max_length, stride):
        tokens = torch.from_numpy(ids[w.begin : w.end].astype(np.int64))[None]
        log_p = model(tokens, use_cache=False).logits[0].log_softmax(-1)
        for place in range(w.first, w.end):
            losses[place] = (place - w.begin, -float(log_p[place - w.begin - 1, tokens[0, place - w.begin]]))
    return losses


@pytest.mark.parametrize(("batch_size", "chunk"), [(1, 2048), (2, 16), (3, 7)])
@pytest.mark.parametrize(("max_length", "stride"), [(50, None), (50, 20), (300, None)])
def test_losses_are_those_of_whole_windows(any_model, batch_size, chunk, max_length, stride, monkeypatch):
    monkeypatch.setattr(evaluation, "PIECE", chunk)
    documents = [document(130), document(61, every=3), document(9)]
    found = document_perplexity(any_model, documents, max_length=max_length, stride=stride, batch_size=batch_size)
    by_place: dict[int, list[float]] = {}
    for ids, labels in documents:
        for place, (offset, loss) in expected_losses(any_model, ids, max_length, stride or max_length).items():
            if labels[place]:
                by_place.setdefault(offset, []).append(loss)
    every = [loss for losses in by_place.values() for loss in losses]
    assert found["tokens"] == len(every)
    assert found["loss"] == pytest.approx(np.mean(every), rel=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert sum(entry["tokens"] for entry in found["positions"]) == len(every)
    for entry in found["positions"]:
        inside = [x for place in range(entry["start"], entry["end"]) for x in by_place.get(place, [])]
        assert entry["loss"] == pytest.approx(np.mean(inside), rel=1e-3)


def test_past_the_training_length(linear_model, monkeypatch):
    monkeypatch.setattr(evaluation, "PIECE", 32)
    seen = []
    found = document_perplexity(
        linear_model,
        [document(200)],
        max_length=200,
        training_length=64,
        on_progress=lambda *both: seen.append(both),
    )
    past = found["past_training"]
    assert (past["within"]["start"], past["within"]["end"], past["past"]["end"]) == (32, 64, 200)
    assert (past["past"]["tokens"], seen[-1]) == (136, (200, 200))
    assert "past_training" not in document_perplexity(linear_model, [document(60)], max_length=200, training_length=64)


def test_a_begin_token_in_front_of_every_window(linear_model):
    """The same as documents that are one window each and have it: the tokens scored are those without it."""
    ids, labels = document(40)
    found = document_perplexity(linear_model, [(ids, labels)], max_length=21, begin_with=7)
    with_token = [
        (np.insert(ids[begin : begin + 20], 0, 7), np.insert(labels[begin : begin + 20], 0, [False]))
        for begin in (0, 20)
    ]
    for _, wanted in with_token:
        wanted[1] = False
    alone = document_perplexity(linear_model, with_token, max_length=21)
    assert found == alone
    plain = document_perplexity(linear_model, [(ids, labels)], max_length=20)
    assert found["tokens"] == plain["tokens"] == 38
    assert found["loss"] != plain["loss"]


def test_nothing_to_score(linear_model):
    ids, labels = document(10)
    with pytest.raises(UserError, match="no token to score"):
        document_perplexity(linear_model, [(ids, labels & False)], max_length=20)
    with pytest.raises(UserError, match="stride=30"):
        document_perplexity(linear_model, [(ids, labels)], max_length=20, stride=30)
