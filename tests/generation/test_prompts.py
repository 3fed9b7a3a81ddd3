"""Files of prompts and of answers."""

from __future__ import annotations

import json

import pytest

from lolcats.errors import UserError
from lolcats.generation.prompts import AnswerFile, answer_lines, read_prompts, record
from lolcats.generation.sampling import SamplingParams


def write(file, *values):
    file.write_text("\n".join(item if isinstance(item, str) else json.dumps(item) for item in values))
    return file


def test_text_files(tmp_path):
    file = tmp_path / "p.txt"
    file.write_bytes("one\r\n\n  two \n\u2028three".encode())  # other line separators belong to the prompt
    assert [(item.id, item.text) for item in read_prompts(["a", "b"], file)[2:]] == [
        (2, "one"),
        (3, "  two "),
        (4, "\u2028three"),
    ]


def test_json_lines(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    file = write(tmp_path / "p.jsonl", {"prompt": "a"}, {"id": "x", "prompt": "b", "top_k": 3}, {"messages": messages})
    first, second, third = read_prompts([], file)
    assert (first.id, first.params) == (0, {})
    assert (second.id, second.number, second.params) == ("x", 1, {"top_k": 3})
    assert (third.messages, third.text) == (messages, "hi")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2: Invalid JSON"),
        ("[1]", "line 2: Input should be an object"),
        ({"text": "a"}, "line 2: unknown parameter 'text'"),
        ({"temperature": 1}, 'line 2: expected either "prompt"'),
        ({"prompt": "a", "messages": []}, 'line 2: expected either "prompt"'),
        ({"prompt": "a", "temprature": 1}, "line 2: unknown parameter 'temprature'"),
        ({"prompt": "a", "temperature": -1}, "line 2: temperature: Input should be"),
        ({"prompt": "a", "id": [1]}, "line 2: id"),
        ({"prompt": "a", "id": 0}, "2 prompts have the id 0"),
    ],
)
def test_mistakes_name_their_line(tmp_path, line, message):
    with pytest.raises(UserError, match=message):
        read_prompts([], write(tmp_path / "p.jsonl", {"prompt": "first"}, line))


def test_answers_take_their_own_parameters(kit, model, tokenizer, make_engine, tmp_path):
    lines = [
        {"prompt": "abc", "max_new_tokens": 3},
        {"prompt": "abc", "id": "twice", "temperature": 2.0},
        {"prompt": "abc", "temperature": 2.0},
        {"prompt": "abc", "temperature": 2.0, "seed": 5 + 1},
        {"messages": [{"role": "user", "content": "abc"}], "max_new_tokens": 4},
    ]
    prompts = read_prompts([], write(tmp_path / "p.jsonl", *lines))
    params = SamplingParams(max_new_tokens=10, ignore_eos=True, seed=5)
    results = {prompt.id: result for prompt, result in answer_lines(make_engine(), prompts, params, chat=False)}
    plain, chat = tokenizer("abc")["input_ids"], tokenizer("<user>abc<end><assistant>")["input_ids"]
    assert results[0].token_ids == make_engine().generate([plain], SamplingParams(max_new_tokens=3))[0].token_ids
    assert results[4].token_ids == make_engine().generate([chat], SamplingParams(max_new_tokens=4))[0].token_ids
    assert results["twice"].token_ids == results[3].token_ids  # the same seed: 5 + number, and given
    assert results["twice"].token_ids != results[2].token_ids


def test_an_interrupted_run_goes_on(make_engine, tmp_path):
    file = tmp_path / "out.jsonl"
    prompts = read_prompts([], write(tmp_path / "p.txt", *(f"prompt {index}" for index in range(6))))
    params = SamplingParams(max_new_tokens=4, temperature=1.0, seed=0)
    whole = {item.id: record(item, result) for item, result in answer_lines(make_engine(), prompts, params, False)}
    with AnswerFile(file, resume=False) as answers:
        for index in range(3):
            answers.write(whole[index])
        assert len(file.read_text().splitlines()) == 3  # written out at once
        answers.write(whole[3] | {"finish_reason": "error"})
    with file.open("a") as stream:
        stream.write('{"id": 4, "pro')  # killed while writing
    with pytest.raises(UserError, match="exists; continue it with --resume"):
        AnswerFile(file, resume=False)
    with AnswerFile(file, resume=True) as answers:
        assert answers.finished == {0, 1, 2}
        left = [item for item in prompts if item.id not in answers.finished]
        for item, result in answer_lines(make_engine(), left, params, False):
            answers.write(record(item, result))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["id"]: line for line in lines} == whole
    assert len(lines) == 7


def test_other_files_are_not_taken_for_answers(tmp_path):
    file = write(tmp_path / "out.jsonl", {"prompt": "mine"}, "")
    with pytest.raises(UserError, match="line 1: not an answer"):
        AnswerFile(file, resume=True)
    assert file.read_text() == '{"prompt": "mine"}\n'
    with pytest.raises(UserError, match="cannot write --output"):
        AnswerFile(tmp_path / "absent" / "out.jsonl", resume=False)
    with AnswerFile(tmp_path / "new.jsonl", resume=True) as answers:  # nothing there yet is fine
        assert answers.finished == set()
