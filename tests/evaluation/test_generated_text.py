"""Numbers on generated text: agreement with a teacher, passkeys; and copies of caches."""

from __future__ import annotations

import json
import re

import pytest
import torch

from lolcats.config import DataSection
from lolcats.data.passkey import draw
from lolcats.errors import UserError
from lolcats.evaluation import agreement as agreement_module
from lolcats.evaluation import passkey as evaluation
from lolcats.evaluation.agreement import (
    GenerationPrompt,
    agreement,
    generation_prompts,
    generation_quality,
    repetition_rate,
)
from lolcats.evaluation.passkey import is_passkey, passkey_accuracy, passkey_samples
from lolcats.evaluation.scoring import fork, has_constant_state
from lolcats.generation import decoding
from lolcats.generation.decoding import prefill
from lolcats.generation.sampling import SamplingParams

PROMPTS = [GenerationPrompt(text, answer) for text, answer in [("The sky is", " blue"), ("Which river", None)]]


@pytest.mark.parametrize(
    ("tokens", "rate"),
    [([1, 2, 3, 4, 5], 0.0), ([1, 2, 3], None), ([7] * 8, 0.8), ([1, 2, 3, 4, 1, 2, 3, 4], 0.2)],
)
def test_repetition(tokens, rate):
    assert repetition_rate(tokens) == (None if rate is None else pytest.approx(rate))


def test_a_model_agrees_with_itself(any_model, tokenizer):
    _, teacher = generation_quality(any_model, tokenizer, PROMPTS, spans=(12,))
    for entry in agreement(any_model, tokenizer, PROMPTS, teacher, spans=(4, 12), batch_size=1):
        assert entry["equal_share"] == 1.0
        assert entry["matching_prefix"] == entry["teacher_tokens"]
    assert entry["span"] == 12


def test_agreement_is_that_of_the_two_continuations(softmax_model, linear_model, tokenizer, monkeypatch):
    monkeypatch.setattr(agreement_module, "end_tokens", lambda model: frozenset())
    models = (softmax_model, linear_model)
    teacher, student = (generation_quality(model, tokenizer, PROMPTS, spans=(10,))[1] for model in models)
    teacher[1] = [*student[1][:3], 5, *teacher[1][4:]]  # certainly equal for a while
    if student[1][3] == 5:
        teacher[1][3] = 6
    (entry,) = agreement(linear_model, tokenizer, PROMPTS, teacher, spans=(10,))
    pairs = zip(teacher, student, strict=True)
    expected = [next((n for n, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), 10) for pair in pairs]
    assert expected[1] == 3
    assert entry["matching_prefix"] == sum(expected) / 2
    assert sum(expected) / 20 <= entry["equal_share"] < 1.0


def test_all_numbers(linear_model, tokenizer):
    result, generated = generation_quality(linear_model, tokenizer, PROMPTS, spans=(4, 8))
    right = GenerationPrompt(PROMPTS[0].text, f" {tokenizer.decode(generated[0], skip_special_tokens=True)}\n")
    assert generation_quality(linear_model, tokenizer, [right], spans=(4, 8))[0]["exact_match"] == 1.0
    assert [len(tokens) <= 8 for tokens in generated] == [True, True]
    assert "agreement" not in result
    assert (result["prompts"], result["exact_match"]) == (2, 0.0)
    assert result["samples"][0]["prompt"] == "The sky is"
    compared, again = generation_quality(linear_model, tokenizer, PROMPTS, teacher=generated, spans=(4, 8))
    assert again == generated
    assert [entry["equal_share"] for entry in compared["agreement"]] == [1.0, 1.0]
    json.dumps(compared)


def test_prompts_from_records_and_texts(tokenizer, tmp_path):
    records = tmp_path / "records.jsonl"
    records.write_text(json.dumps({"instruction": "Name a river.", "input": "", "output": "Rhine"}) + "\n")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) + "\n" for n in range(9)))
    text = tmp_path / "text.txt"
    text.write_text("short\n\n" + "The grass is green. The sky is blue. " * 40)
    sources = [{"path": str(path)} for path in (records, pairs, text)]
    data = DataSection.model_validate({"sources": sources})
    prompts = generation_prompts(data, tokenizer, 20)
    assert len(prompts) == 1 + 9 + 1
    assert prompts[0].text.endswith("### Response:\n")
    assert prompts[0].answer == "Rhine"
    assert prompts[1] == GenerationPrompt("0 + 1 =", "1")
    assert prompts[-1].answer is None
    assert len(tokenizer(prompts[-1].text).input_ids) == 64
    assert len(generation_prompts(data, tokenizer, 3)) == 3
    text.write_text("too short")
    with pytest.raises(UserError, match="no prompts"):
        generation_prompts(data.model_copy(update={"sources": data.sources[2:]}), tokenizer, 4)


# --- passkeys -----------------------------------------------------------------------------------------------------


def test_only_the_exact_number_counts():
    assert all(is_passkey(text, 12345) for text in (" 12345", "12345. Remember"))
    assert not any(is_passkey(text, 12345) for text in (" 123456", "1234", "is 12345", ""))


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

    def near_sighted(model, prompts, params, **options):
        answers = []
        for prompt in prompts:
            found = re.search(r"The pass key is (\d+)", tokenizer.decode(prompt)[-300:])
            answers.append(tokenizer(f" {found[1]}." if found else " 1").input_ids)
        return answers

    monkeypatch.setattr(evaluation, "continuations", near_sighted)
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
    with pytest.raises(UserError, match="needs at least"):
        passkey_accuracy(any_model, tokenizer, lengths=(20,), per_decile=1)


# --- caches -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_forked_cache_leaves_the_first_one_as_it_is(any_model):
    ids = torch.tensor([torch.randint(1, 320, (40,)).tolist()])
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


def test_greedy_batches_are_those_of_each_prompt_alone(any_model):
    """Padded, prompts in pieces; the one decoder that teacher and student share."""
    prompts = [torch.randint(1, 320, (length,)).tolist() for length in (5, 40, 12, 1, 27)]
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": False}
    expected = [
        any_model.generate(torch.tensor([prompt]), max_new_tokens=6, **options)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    found = decoding.continuations(any_model, prompts, SamplingParams(max_new_tokens=6), batch_size=3, chunk=7)
    assert found == expected
