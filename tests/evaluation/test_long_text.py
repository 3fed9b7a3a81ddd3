"""Perplexity of documents in windows, and by position."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from lolcats.errors import UserError
from lolcats.evaluation.load import training_length
from lolcats.evaluation.perplexity import document_perplexity, windows

GENERATOR = np.random.default_rng(4)


def document(length: int, every: int = 1):
    labels = np.arange(length) % every == 0
    return GENERATOR.integers(1, 320, length).astype(np.int32), labels


@pytest.mark.parametrize(("max_length", "stride"), [(10, 10), (10, 3), (10, 1), (7, 5), (100, 100), (100, 2)])
def test_every_token_but_the_first_is_scored_once(max_length, stride):
    lengths = [1, 2, 10, 11, 25, 33]
    scored = {(w.document, place) for w in windows(lengths, max_length, stride) for place in range(w.first, w.end)}
    # A token at the beginning of a window has nothing before it; only windows that overlap reach it.
    borders = (
        {(d, p) for d, n in enumerate(lengths) for p in range(stride, n, stride)} if max_length == stride else set()
    )
    assert scored == {(d, p) for d, n in enumerate(lengths) for p in range(1, n)} - borders
    assert len(scored) == sum(w.end - w.first for w in windows(lengths, max_length, stride))
    for window in windows(lengths, max_length, stride):
        assert window.end - window.begin <= max_length
        if window.begin:
            assert window.first - window.begin >= min(max_length - stride, 1)


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
def test_losses_are_those_of_whole_windows(any_model, batch_size, chunk, max_length, stride):
    documents = [document(130), document(61, every=3), document(9)]
    found = document_perplexity(
        any_model, documents, max_length=max_length, stride=stride, batch_size=batch_size, chunk=chunk
    )
    by_place: dict[int, list[float]] = {}
    for ids, labels in documents:
        for place, (offset, loss) in expected_losses(any_model, ids, max_length, stride or max_length).items():
            if labels[place]:
                by_place.setdefault(offset, []).append(loss)
    every = [loss for losses in by_place.values() for loss in losses]
    assert found["tokens"] == len(every)
    assert found["loss"] == pytest.approx(np.mean(every), rel=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    for entries in (found["positions"], found["curve"]):
        assert sum(entry["tokens"] for entry in entries) == len(every)
        for entry in entries:
            inside = [x for place in range(entry["start"], entry["end"]) for x in by_place.get(place, [])]
            assert entry["loss"] == pytest.approx(np.mean(inside), rel=1e-3)


def test_past_the_training_length(linear_model):
    found = document_perplexity(linear_model, [document(200)], max_length=200, training_length=64, chunk=32)
    past = found["past_training"]
    assert (past["within"]["start"], past["within"]["end"], past["past"]["end"]) == (32, 64, 200)
    assert past["past"]["tokens"] == 136
    assert "past_training" not in document_perplexity(linear_model, [document(60)], max_length=200, training_length=64)


def test_positions_double_and_the_curve_is_even(linear_model):
    found = document_perplexity(linear_model, [document(700)], max_length=700)
    assert [entry["end"] for entry in found["positions"]] == [64, 128, 256, 512, 700]
    assert {entry["end"] - entry["start"] for entry in found["curve"][:-1]} == {3}


def test_progress_counts_tokens(linear_model):
    seen = []
    document_perplexity(
        linear_model, [document(30), document(12)], max_length=20, on_progress=lambda *both: seen.append(both)
    )
    assert seen[-1] == (42, 42)


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


def test_training_length_from_the_report(tmp_path):
    assert training_length(tmp_path) is None
    report = {"config": {"data": {"sequence_length": 512}}}
    (tmp_path / "lolcats_report.json").write_text(json.dumps(report))
    assert training_length(tmp_path) == 512
