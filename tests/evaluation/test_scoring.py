"""Batches and shared rows change nothing: scores are those of one forward pass for each request."""

from __future__ import annotations

import pytest
import torch

from lolcats.evaluation import scoring
from lolcats.evaluation.scoring import Scorer
from lolcats.generation.decoding import logits_at

GENERATOR = torch.Generator().manual_seed(5)


def ids(count: int) -> list[int]:
    return torch.randint(1, 320, (count,), generator=GENERATOR).tolist()


STEM = ids(70)
OTHER_STEM = ids(65)
REQUESTS = [
    *((STEM + rest, end) for rest in (ids(9), ids(4), ids(30)) for end in (ids(1), ids(1), ids(5))),
    *((OTHER_STEM + rest, end) for rest in (ids(3), ids(12), ids(7), ids(1)) for end in (ids(2), ids(8))),
    *((ids(length), ids(length % 4 + 1)) for length in (1, 2, 9, 33)),
    (STEM[:40], ids(3)),
]


@torch.no_grad()
def plainly(model, context, continuation, max_length=4096):
    """(score, greedy) from a forward pass of its own."""
    tokens = torch.tensor([(context + continuation)[-(max_length + 1) :]])
    logits = model(tokens[:, :-1], use_cache=False).logits[0, -len(continuation) :].log_softmax(-1)
    wanted = torch.tensor(continuation)
    return float(logits.gather(1, wanted[:, None]).sum()), bool((logits.argmax(-1) == wanted).all())


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_scores_are_those_of_single_passes(any_model, batch_size):
    scorer = Scorer(any_model, max_length=4096, batch_size=batch_size)
    for (score, greedy), request in zip(scorer.score(REQUESTS), REQUESTS, strict=True):
        expected, is_greedy = plainly(any_model, *request)
        assert score == pytest.approx(expected, abs=2e-3, rel=1e-4)  # other order of float32 sums
        assert greedy == is_greedy


def test_greedy_continuations_are_recognised(any_model):
    context = ids(20)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    best = any_model.generate(torch.tensor([context]), max_new_tokens=4, **options)[0, 20:].tolist()
    other = [*best[:3], (best[3] + 1) % 320]
    found = Scorer(any_model, max_length=99).score([(context, best), (context, other)])
    assert [greedy for _, greedy in found] == [True, False]


@torch.no_grad()
def test_logits_of_some_positions(any_model):
    tokens_BT = torch.tensor([ids(7), ids(7)])
    expected_BTV = any_model(tokens_BT, use_cache=False).logits
    with logits_at(any_model, torch.tensor([2, 6, 7, 11])):
        found_1MV = any_model(tokens_BT, use_cache=False).logits
    torch.testing.assert_close(found_1MV[0], torch.cat([expected_BTV[0, [2, 6]], expected_BTV[1, [0, 4]]]))
    assert any_model(tokens_BT, use_cache=False).logits.shape == expected_BTV.shape


def test_too_long_contexts_lose_their_beginning(any_model):
    context, continuation = ids(30), ids(3)
    ((score, _),) = Scorer(any_model, max_length=16).score([(context, continuation)])
    expected, _ = plainly(any_model, context, continuation, max_length=16)
    assert score == pytest.approx(expected, abs=1e-3)
    assert score != pytest.approx(plainly(any_model, context, continuation)[0], abs=1e-2)


@pytest.mark.parametrize("request_", [([], [1]), ([1], []), ([1], [1] * 20)])
def test_requests_that_cannot_be_scored(softmax_model, request_):
    with pytest.raises(ValueError, match="max_length=16"):
        Scorer(softmax_model, max_length=16).score([request_])


def test_batches_keep_to_their_limits(softmax_model, monkeypatch):
    def lengths(lengths, scored=1, **limits):
        rows = {tuple(range(length)): [(0, [1] * scored)] for length in lengths}
        return [[len(row) for row in batch] for batch in Scorer(softmax_model, max_length=99, **limits)._batches(rows)]

    assert lengths((3, 9, 4, 8, 1), batch_size=2) == [[9, 8], [4, 3], [1]]
    assert lengths((3, 9, 4, 8, 1), batch_tokens=18) == [[9, 8], [4, 3, 1]]
    monkeypatch.setattr(scoring, "MAX_PADDING", 5)
    assert lengths((9, 8, 7, 6, 2)) == [[9, 8, 7], [6, 2]]  # 1 and 2 make three, and 3 more would be six
    monkeypatch.setattr(scoring, "LOGITS_AT_A_TIME", 4 * 320)
    assert lengths((9, 8, 7), scored=2) == [[9, 8], [7]]


def test_choices_of_one_token_share_a_row(softmax_model, monkeypatch):
    read = []
    forward = type(softmax_model).forward
    monkeypatch.setattr(
        type(softmax_model),
        "forward",
        lambda self, **call: read.append(call["input_ids"].shape) or forward(self, **call),
    )
    done = []
    requests = [(STEM, [token]) for token in (3, 4, 5)]
    assert len(set(Scorer(softmax_model, max_length=99).score(requests, lambda *both: done.append(both)))) == 3
    assert (read, done) == ([(1, 70)], [(3, 3)])
