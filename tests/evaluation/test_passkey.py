"""Passkey accuracy, with models that know or do not know the answer."""

from __future__ import annotations

import re

import pytest

from lolcats.data.passkey import draw
from lolcats.errors import UserError
from lolcats.evaluation import passkey as evaluation
from lolcats.evaluation.passkey import is_passkey, passkey_accuracy, passkey_samples


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" 12345", True),
        ("12345. Remember", True),
        (" 123456", False),
        ("1234", False),
        ("is 12345", False),
        ("", False),
    ],
)
def test_only_the_exact_number_counts(text, right):
    assert is_passkey(text, 12345) is right


def test_samples_fill_their_length_at_their_depth(tokenizer):
    samples = passkey_samples(tokenizer, 600, per_decile=2, seed=3)
    assert [decile for _, decile, _ in samples] == [index // 2 for index in range(20)]
    for passkey, decile, sample in samples:
        assert 10_000 <= passkey < 100_000
        assert sample.answer == f" {passkey}"
        tokens = len(tokenizer(sample.prompt + sample.answer).input_ids)
        assert 560 < tokens <= 600
        before = sample.prompt.split("The pass key is")[0].count(".")
        after = sample.prompt.split("is the pass key.")[1].count(".")
        share = (before - 3) / (before - 3 + after)  # the task has three sentences
        assert decile / 10 - 0.05 < share < decile / 10 + 0.15
    assert passkey_samples(tokenizer, 600, per_decile=2, seed=3) == samples
    assert passkey_samples(tokenizer, 600, per_decile=2, seed=4) != samples


def test_training_draws_other_passkeys(tokenizer):
    samples = passkey_samples(tokenizer, 600, per_decile=2)
    evaluated = {(passkey, round(10 * sample.depth - decile, 6)) for passkey, decile, sample in samples}
    assert not evaluated & {(row["passkey"], round(row["depth"], 6)) for row in draw(1000, seed=0)}


def test_accuracy_by_depth(linear_model, tokenizer, monkeypatch):
    """A model that reads only the last 300 characters finds the late passkeys."""

    def near_sighted(model, prompts, count, **options):
        answers = []
        for prompt in prompts:
            found = re.search(r"The pass key is (\d+)", tokenizer.decode(prompt)[-300:])
            answers.append(tokenizer(f" {found[1]}." if found else " 1").input_ids)
        return answers

    monkeypatch.setattr(evaluation, "greedy", near_sighted)
    seen = []
    (result,) = passkey_accuracy(
        linear_model, tokenizer, lengths=(600,), per_decile=4, on_progress=lambda done, total: seen.append(total)
    )
    assert result["deciles"][0] == 0.0
    assert result["deciles"][9] == 1.0
    assert result["accuracy"] == pytest.approx(sum(result["deciles"]) / 10)
    assert (result["length"], result["samples"], set(seen)) == (600, 40, {40})
    assert 0 < result["stderr"] < 0.1


def test_a_random_model_finds_nothing(any_model, tokenizer):
    results = passkey_accuracy(any_model, tokenizer, lengths=(260, 300), per_decile=1, batch_size=4, chunk=64)
    assert [result["accuracy"] for result in results] == [0.0, 0.0]


def test_too_short(linear_model, tokenizer):
    with pytest.raises(UserError, match="needs at least"):
        passkey_accuracy(linear_model, tokenizer, lengths=(20,), per_decile=1)
