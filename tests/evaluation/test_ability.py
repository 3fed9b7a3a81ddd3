"""Tasks whose answers are generated, what stands before their questions, and the engine that answers."""

from __future__ import annotations

import copy
import json
import re

import pytest

pytest.importorskip("lm_eval", reason="lolcats[eval] is not installed")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from lolcats.evaluation.lm_eval_run import LolcatsLM, run_tasks
from lolcats.evaluation.tasks import load_tasks


def test_other_code_and_shots_before_questions(eval_data, softmax_model, tokenizer, monkeypatch):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last or add_generation_prompt %}<end>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    prompts = []

    def generate_until(self, requests, disable_tqdm=False):
        prompts.extend(request.args[0] for request in requests)
        return ["1,000 and 1 are 1,001"] * len(requests)

    monkeypatch.setattr(LolcatsLM, "generate_until", generate_until)
    names = ["gsm8k_0shot", "gsm8k_2shot", "gsm8k_1k_0shot"]
    tasks = load_tasks(names, str(eval_data), 0, tokenizer, chat=True)
    found = run_tasks(softmax_model, tokenizer, tasks, chat=None)
    assert [found[name]["value"] for name in names] == pytest.approx([1 / 3] * 3)
    assert [found[name]["shots"] for name in names] == [0, 2, 0]
    assert [prompt.count("<assistant>") for prompt in prompts] == [1] * 3 + [3] * 3 + [1] * 3
    for alone, behind in zip(prompts, prompts[6:], strict=False):
        assert behind.endswith(alone.removeprefix("<user>"))
        assert 1024 < len(tokenizer(behind)["input_ids"]) - len(tokenizer(alone)["input_ids"]) < 1100


def test_many_shot_labels(tmp_path):
    rows = [{"subject": subject, "question": f"{subject} {n}"} for subject in "abcdefgh" for n in range(9)]
    (tmp_path / "mmlu").mkdir()
    (tmp_path / "mmlu/test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = load_tasks(["topics_40shot"], str(tmp_path), 0)["topics_40shot"]
    asked = task.test_docs()
    for row in asked:
        named = dict(re.findall(r"([a-h]) \d\nGroup: ([A-F])\n", row["text"]))
        *_, last = row["text"].split("\n\n")
        assert (row["text"].count("Group: "), named.get(last[0], row["label"])) == (40, row["label"])
    assert task.process_results(asked[0], [f" {asked[0]['label']}\n"]) == {"acc": 1.0}


def test_the_engine_answers_as_generate_does(linear_model, tokenizer):
    options = {"until": ["ee"], "max_gen_toks": 12, "do_sample": False}
    texts = ["The sky is", "Which river is the longest? " * 9, "There"]
    requests = [Instance("generate_until", {}, (text, options), index) for index, text in enumerate(texts)]
    found, expected = (
        adapter(pretrained=linear_model, tokenizer=tokenizer, batch_size=2, device="cpu").generate_until(
            requests, disable_tqdm=True
        )
        for adapter in (LolcatsLM, HFLM)
    )
    assert found == expected
