"""Greedy continuations in batches are those of `generate()` on each prompt alone."""

from __future__ import annotations

import pytest
import torch

from lolcats.evaluation.scoring import fork, has_constant_state
from lolcats.generation.decoding import continuations, prefill
from lolcats.generation.sampling import SamplingParams

GENERATOR = torch.Generator().manual_seed(9)
PROMPTS = [torch.randint(1, 320, (length,), generator=GENERATOR).tolist() for length in (5, 40, 12, 1, 27)]
SIX = SamplingParams(max_new_tokens=6)


def alone(model, prompt, new):
    made = model.generate(
        torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=False
    )
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("batch_size", "chunk"), [(1, 2048), (3, 7), (8, 2048)])
def test_continuations(any_model, batch_size, chunk):
    expected = [alone(any_model, prompt, 6) for prompt in PROMPTS]
    assert continuations(any_model, PROMPTS, SIX, batch_size=batch_size, chunk=chunk) == expected


def test_an_end_token_ends_one_row_only(linear_model):
    whole = continuations(linear_model, PROMPTS, SIX)
    end = whole[1][2]
    shortened = continuations(linear_model, PROMPTS, SIX, ends={end})
    assert shortened == [row[: row.index(end) + 1] if end in row else row for row in whole]
    assert shortened[1][-1] == end
    assert len(shortened[1]) <= 3


@torch.no_grad()
def test_a_forked_cache_leaves_the_first_one_as_it_is(any_model):
    ids = torch.tensor(PROMPTS[1:2])
    _, cache = prefill(any_model, ids[:, :30])
    expected = any_model(ids, use_cache=False).logits[:, -1]
    for rows in ([0, 0, 0], [0], [0, 0]):
        copied = fork(cache, torch.tensor(rows))
        tokens = ids[:, 30:].expand(len(rows), -1)
        logits = any_model(tokens, past_key_values=copied, use_cache=True).logits[:, -1]
        torch.testing.assert_close(logits, expected.expand(len(rows), -1), rtol=1e-3, atol=1e-3)
    copied = fork(cache, torch.tensor([0]))
    for step in range(30, 40):  # one token at a time, which may write into states
        any_model(ids[:, step : step + 1], past_key_values=copied, use_cache=True)
    logits = any_model(ids[:, 30:], past_key_values=fork(cache, torch.tensor([0])), use_cache=True).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_constant_state(softmax_model, linear_model, hybrid_model):
    assert [has_constant_state(model) for model in (softmax_model, linear_model, hybrid_model)] == [False, True, False]
