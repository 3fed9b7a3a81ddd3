"""Log-likelihoods: batches, shared rows and limits; `test_lm_eval` compares scores with lm-eval's own."""

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
    requests = [(context[-14:], continuation), (context, continuation)]
    expected, other = Scorer(any_model, max_length=99).score(requests)
    (found,) = Scorer(any_model, max_length=16).score([(context, continuation)])
    assert found[0] == pytest.approx(expected[0], abs=1e-3) != pytest.approx(other[0], abs=1e-2)


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
