"""Numbers on generated text."""

from __future__ import annotations

import json

import pytest

from lolcats.config import DataSection
from lolcats.errors import UserError
from lolcats.evaluation import agreement as agreement_module
from lolcats.evaluation.agreement import (
    GenerationPrompt,
    agreement,
    continuations,
    exact_match,
    generation_prompts,
    generation_quality,
    repetition_rate,
)

PROMPTS = [GenerationPrompt(text, answer) for text, answer in [("The sky is", " blue"), ("Which river", None)]]


@pytest.mark.parametrize(
    ("tokens", "rate"),
    [([1, 2, 3, 4, 5], 0.0), ([1, 2, 3], None), ([7] * 8, 0.8), ([1, 2, 3, 4, 1, 2, 3, 4], 0.2)],
)
def test_repetition(tokens, rate):
    assert repetition_rate(tokens) == (None if rate is None else pytest.approx(rate))


def test_exact_match_ignores_white_space():
    assert exact_match(" a  river\n", "a river")
    assert not exact_match("a river, long", "a river")


def test_a_model_agrees_with_itself(any_model, tokenizer):
    teacher = continuations(any_model, tokenizer, PROMPTS, max_new_tokens=12)
    for entry in agreement(any_model, tokenizer, PROMPTS, teacher, spans=(4, 12), batch_size=1):
        assert entry["equal_share"] == 1.0
        assert entry["matching_prefix"] == entry["teacher_tokens"]
    assert entry["span"] == 12


def test_agreement_is_that_of_the_two_continuations(softmax_model, linear_model, tokenizer, monkeypatch):
    monkeypatch.setattr(agreement_module, "end_tokens", lambda model: frozenset())
    teacher = continuations(softmax_model, tokenizer, PROMPTS, max_new_tokens=10)
    student = continuations(linear_model, tokenizer, PROMPTS, max_new_tokens=10)
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


def test_no_prompts(tokenizer, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("too short")
    with pytest.raises(UserError, match="no prompts"):
        generation_prompts(DataSection.model_validate({"sources": [{"path": str(file)}]}), tokenizer, 4)
