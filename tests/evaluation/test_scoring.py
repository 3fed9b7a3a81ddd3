"""Shared computation changes nothing: scores are those of one forward pass for each request."""

from __future__ import annotations

import pytest
import torch

from lolcats.errors import UserError
from lolcats.evaluation.scoring import Scorer, logits_only_at

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
@pytest.mark.parametrize("min_saved", [1, 10**9])  # with and without shared beginnings
def test_scores_are_those_of_single_passes(any_model, batch_size, min_saved):
    scorer = Scorer(any_model, max_length=4096, batch_size=batch_size, min_saved=min_saved)
    for (score, greedy), request in zip(scorer.score(REQUESTS), REQUESTS, strict=True):
        expected, is_greedy = plainly(any_model, *request)
        assert score == pytest.approx(expected, abs=2e-3, rel=1e-4)  # other order of float32 sums
        assert greedy == is_greedy


def test_greedy_continuations_are_recognised(any_model):
    context = ids(20)
    tokens = torch.tensor([context])
    made = any_model.generate(tokens, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    best = made[0, 20:].tolist()
    other = [*best[:3], (best[3] + 1) % 320]
    assert [greedy for _, greedy in Scorer(any_model, max_length=99).score([(context, best), (context, other)])] == [
        True,
        False,
    ]


def test_what_is_shared_is_computed_once(linear_model):
    together = Scorer(linear_model, max_length=4096, min_saved=1)
    together.score([([*STEM, 1, 2, 3], [4]), ([*STEM, 1, 2, 3], [5]), ([*STEM, 9, 9], [4, 6])])
    # the stem, two rests, and the one continuation token that is read
    assert together.tokens_computed == 70 + 3 + 2 + 1
    apart = Scorer(linear_model, max_length=4096)
    apart.score([([*STEM, 1, 2, 3], [4]), ([*STEM, 9, 9], [4, 6])])
    assert apart.tokens_computed == 73 + 72 + 1


@torch.no_grad()
def test_logits_of_some_positions(any_model):
    tokens_BT = torch.tensor([ids(7), ids(7)])
    expected_BTV = any_model(tokens_BT, use_cache=False).logits
    with logits_only_at(torch.tensor([2, 6, 7, 11]), any_model.get_output_embeddings()):
        found_1MV = any_model(tokens_BT, use_cache=False).logits
    torch.testing.assert_close(found_1MV[0], torch.cat([expected_BTV[0, [2, 6]], expected_BTV[1, [0, 4]]]))
    assert any_model(tokens_BT, use_cache=False).logits.shape == expected_BTV.shape


def test_too_long_contexts_lose_their_beginning(any_model):
    context, continuation = ids(30), ids(3)
    ((score, _),) = Scorer(any_model, max_length=16).score([(context, continuation)])
    expected, _ = plainly(any_model, context, continuation, max_length=16)
    assert score == pytest.approx(expected, abs=1e-3)
    assert score != pytest.approx(plainly(any_model, context, continuation)[0], abs=1e-2)


def test_progress_reaches_the_number_of_requests(softmax_model):
    done = []
    Scorer(softmax_model, max_length=4096, batch_size=2).score(REQUESTS, done.append)
    assert sum(done) == len(REQUESTS)


@pytest.mark.parametrize("request_", [([], [1]), ([1], []), ([1], [1] * 20)])
def test_requests_that_cannot_be_scored(softmax_model, request_):
    with pytest.raises(ValueError, match="max_length=16"):
        Scorer(softmax_model, max_length=16).score([request_])


def test_batches_are_halved_when_memory_runs_out(softmax_model, monkeypatch):
    whole = Scorer(softmax_model, max_length=4096, batch_size=8)
    expected = whole.score(REQUESTS)
    scorer = Scorer(softmax_model, max_length=4096, batch_size=8)
    real = scorer._forward

    def limited(ids_BT, *rest, **options):
        if len(ids_BT) > 3:
            raise torch.OutOfMemoryError("too much")
        return real(ids_BT, *rest, **options)

    monkeypatch.setattr(scorer, "_forward", limited)
    for found, wanted in zip(scorer.score(REQUESTS), expected, strict=True):
        assert found[0] == pytest.approx(wanted[0], abs=2e-3)
    assert scorer.batch_size <= 4
    monkeypatch.setattr(scorer, "_forward", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("none")))
    with pytest.raises(UserError, match="out of memory"):
        scorer.score(REQUESTS)


def test_a_batch_that_was_too_large_is_not_tried_again(softmax_model, monkeypatch):
    scorer = Scorer(softmax_model, max_length=4096, batch_size=8)
    real, refused = scorer._forward, []

    def limited(ids_BT, *rest, **options):
        if len(ids_BT) > 3:
            refused.append(len(ids_BT))
            raise torch.OutOfMemoryError("too much")
        return real(ids_BT, *rest, **options)

    monkeypatch.setattr(scorer, "_forward", limited)
    assert len(scorer.score([([token] * 5, [7]) for token in range(40)])) == 40
    assert refused == [8, 4]
