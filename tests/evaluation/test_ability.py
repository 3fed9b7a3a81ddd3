"""Tasks whose answers are generated: programs, sums, many-shot labels, and what stands before their questions."""

import copy
import json
import re

import pytest

pytest.importorskip("lm_eval", reason="lolcats[eval] is not installed")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from lolcats.errors import UserError
from lolcats.evaluation.lm_eval_run import LolcatsLM, run_tasks
from lolcats.evaluation.programs import pass_at, passes
from lolcats.evaluation.tasks import check_names, load_tasks


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last or add_generation_prompt %}<end>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("from __future__ import annotations\nassert 1 + 1 == 2", True),
        ("assert 1 + 1 == 3", False),
        ("raise SystemExit(0)", False),
        ("import os\nos._exit(0)", False),
        ("exit(85)", False),
        ("while True: pass", False),
        ("import subprocess\nsubprocess.run(['sleep', '99'])", False),
        ("data = bytearray(2 << 30)", False),
        ("print(input())", False),
    ],
)
def test_programs_end_in_time_with_little_memory_or_do_not_pass(program, expected):
    assert passes(program, seconds=20 if expected else 2, memory=1 << 30) is expected


def test_pass_at_k():
    wrong, right = "x = 1", "x = 2"
    found, _ = pass_at(["assert x == 2"] * 2, [[wrong, right], [right, right]], [1, 2])
    assert found == {"pass@1": 0.75, "pass@2": 1.0}


def measure(names, answer, eval_data, model, tokenizer, monkeypatch):
    """What tasks give, and their prompts, with `answer(prompt)` for the model's."""
    prompts = []

    def generate_until(self, requests, disable_tqdm=False):
        prompts.extend(request.args[0] for request in requests)
        return [answer(request.args[0]) for request in requests]

    monkeypatch.setattr(LolcatsLM, "generate_until", generate_until)
    tasks = load_tasks(names, str(eval_data), 0, tokenizer, chat=tokenizer.chat_template is not None)
    return run_tasks(model, tokenizer, tasks, chat=None, run_code=True), prompts


def test_right_and_wrong_programs(eval_data, softmax_model, tokenizer, chat_tokenizer, monkeypatch):
    def solve(prompt):
        number = int(re.findall(r"times_(\d)", prompt)[-1])
        return ["    return 0\n```\nHere it is", "    return x +\n", "    return 2 * x\n\n"][number]

    given, names = (eval_data, softmax_model), ["humaneval", "humaneval_1k"]
    found, prompts = measure(names, solve, *given, chat_tokenizer, monkeypatch)
    for row in found.values():
        assert (row["metric"], row["value"], row["questions"]) == ("pass@1", pytest.approx(2 / 3), 3)
        assert (row["task"], row["chat_template"], row["stderr"] > 0) == ("humaneval_instruct", True, True)
    assert all(re.match(r"<user>(Write|These files).*<end><assistant>Here is", prompt, re.S) for prompt in prompts)
    assert all(prompts[3 + index].endswith(prompts[index].removeprefix("<user>")) for index in range(3))
    lengths = [len(chat_tokenizer(prompt)["input_ids"]) for prompt in prompts]
    assert all(1024 < behind - alone < 1100 for alone, behind in zip(lengths, lengths[3:], strict=False))
    found, prompts = measure(["humaneval"], solve, *given, tokenizer, monkeypatch)
    assert (found["humaneval"]["task"], prompts[0][:11]) == ("humaneval", "def times_0")

    define = lambda prompt: f"def {prompt[prompt.rindex('times_') :][:7]}(x):\n{solve(prompt)}"  # noqa: E731
    assert measure(["mbpp"], define, *given, chat_tokenizer, monkeypatch)[0]["mbpp"]["value"] == pytest.approx(2 / 3)
    with pytest.raises(UserError, match="--run-code"):
        check_names(["humaneval_4k"], str(eval_data))


def test_shots_are_turns_and_the_last_number_counts(eval_data, softmax_model, chat_tokenizer, monkeypatch):
    names, said = ["gsm8k_0shot", "gsm8k_2shot"], "1,000 and 1 are 1,001"
    found, prompts = measure(names, lambda _: said, eval_data, softmax_model, chat_tokenizer, monkeypatch)
    assert [found[name][key] for name in names for key in ("value", "shots")] == pytest.approx([1 / 3, 0, 1 / 3, 2])
    assert [prompt.count("<assistant>") for prompt in prompts] == [1] * 3 + [3] * 3


def test_all_instructions_of_a_prompt_count(tmp_path, softmax_model, chat_tokenizer, monkeypatch):
    monkeypatch.setattr("nltk.download", lambda name: False)  # only two kinds of instructions need its data
    names, words = ["punctuation:no_comma", "length_constraints:number_words"], {"relation": "at least", "num_words": 3}
    rows = [{"key": n, "prompt": "Go on.", "instruction_id_list": names[:n], "kwargs": [{}, words][:n]} for n in (1, 2)]
    (tmp_path / "ifeval").mkdir()
    (tmp_path / "ifeval/train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for said, value in (("two words", 0.5), ("three words, comma", 0), ("three words here", 1)):
        given = (tmp_path, softmax_model, chat_tokenizer, monkeypatch)
        found, prompts = measure(["ifeval"], lambda _, said=said: said, *given)
        assert found["ifeval"]["value"] == value
        assert prompts == ["<user>Go on.<end><assistant>"] * 2


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
