"""Training data that the model writes itself."""

import json
import shutil
from functools import partial
from unittest.mock import Mock

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from lolcats import self_data
from lolcats.config import DataSource, ModelSection
from lolcats.errors import UserError
from lolcats.generation.runner import Runner

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


@pytest.fixture
def chat_dir(model_dir, tmp_path, monkeypatch):
    """A folder of the tiny model with a chat template, and an empty data cache."""
    monkeypatch.setenv("LOLCATS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(self_data, "SHORTEST_TEXT", 20)
    folder = shutil.copytree(model_dir, tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def rows(folder, source, seed=0, console=None):
    section = ModelSection(path=str(folder), device="cpu", dtype="float32")
    file, report = self_data.written_file(section, source, seed, console or Console(quiet=True))
    return [json.loads(line) for line in file.read_text().splitlines()], report, file


def test_a_chat_model_writes_prompts_and_answers(chat_dir, monkeypatch):
    monkeypatch.setattr(type(chat_dir), "write_text", None)  # which leaves a part of a file on a full disk
    written, report, file = rows(chat_dir, DataSource(path="self", max_rows=24))
    assert len(written) == report["rows"]
    assert report["rows"] + sum(report["left_out"].values()) == 24
    assert all(report["left_out"].values())
    asked = [row["messages"][0]["content"] for row in written]
    assert len(set(asked)) == len(asked)
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in written)
    assert rows(chat_dir, DataSource(path="self", max_rows=24))[2] == file  # found again
    assert rows(chat_dir, DataSource(path="self", max_rows=24), seed=1)[0] != written


def test_an_interrupted_call_resumes_with_the_same_rows(chat_dir, monkeypatch, capsys):
    source = DataSource(path="self", max_rows=24)
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "decode", Mock(side_effect=RuntimeError("no memory")))
        with pytest.raises(UserError, match="no memory; rows are kept"):
            rows(chat_dir, source)
    monkeypatch.setattr(self_data, "Progress", partial(self_data.Progress, interval_s=0))
    written, _, file = rows(chat_dir, source, console=Console())
    (last,) = (line for line in capsys.readouterr().out.splitlines() if "own prompts 24/24  0.00M tokens  " in line)
    assert last.endswith("tokens/s  ETA 0:00:00")
    samples = file.with_suffix(".samples")
    kept = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(kept[: len(kept) // 2]) + '{"index": 3, "te')
    file.with_name("about.json").unlink()
    assert rows(chat_dir, source)[0] == written
    assert samples.read_text().splitlines(keepends=True)[: len(kept) // 2] == kept[: len(kept) // 2]


def test_a_base_model_continues_from_its_first_token(chat_dir, model_dir, tmp_path):
    written, _, _ = rows(model_dir, DataSource(path="self", max_rows=12))
    assert all(len(row["text"]) >= 20 for row in written)
    with pytest.raises(UserError, match="has no chat template"):
        rows(model_dir, DataSource(path=str(_file(tmp_path, [{"prompt": "w1 w2 w3 w4"}])), answers="teacher"))


@pytest.mark.parametrize("template", ["{{ messages[0]['content'] }}<|end|>", "<|user|>{{ messages[0]['content'] }}"])
def test_a_template_that_marks_no_message(template, chat_dir):
    tokenizer = AutoTokenizer.from_pretrained(chat_dir)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(chat_dir)
    with pytest.raises(UserError, match="no beginning or no end"):
        rows(chat_dir, DataSource(path="self", max_rows=12))


def test_prompts_that_the_user_gives(chat_dir, tmp_path):
    old = {"role": "assistant", "content": "old"}
    given = [{"messages": [{"role": "user", "content": f"w{index} w2 w3"}, old]} for index in range(8)]
    for row in given[::2]:
        row["messages"].insert(0, {"role": "system", "content": "w9"})
    written, report, _ = rows(chat_dir, DataSource(path=str(_file(tmp_path, given)), answers="teacher"))
    assert report["sampling"]["prompts"] == "given"
    assert {"system", "user"} == {row["messages"][0]["role"] for row in written}
    same = [{"messages": [{"role": "system", "content": f"w{index % 3}"}, *given[1]["messages"]]} for index in range(6)]
    _, report, file = rows(chat_dir, DataSource(path=str(_file(tmp_path, same)), answers="teacher"))
    assert report["left_out"]["prompts like another"] == 3  # another system message makes another prompt
    assert len(file.with_suffix(".samples").read_text().splitlines()) == 3
    assert all(row["messages"][-1] != old for row in written)


def test_what_rows_ask(tmp_path, capsys):
    """In every form that is read with answers; the others are counted."""
    user = {"role": "user", "content": "w1"}
    given = {
        "context": {"instruction": "w1", "context": "w2", "response": "old", "system": "w9"},
        "question": {"question": "w1", "context": "w2"},
        "shared": {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "old"}]},
        "text": {"messages": json.dumps([user]), "system": "w9"},
        "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "w1"}]}]},
        "prompt": {"prompt": [user], "completion": "old"},
        "constant": {"instruction": "Answer.", "question": "w1", "answer": "old", "tools": "[]"},
    }
    system, both = {"role": "system", "content": "w9"}, {"role": "user", "content": "w1\n\nw2"}
    expected = {"context": [system, both], "question": [both], "text": [system, user]}
    for name, row in given.items():
        source = DataSource(path=str(_file(tmp_path, [row, {**row, "tools": '[{"name": "f"}]'}])), answers="teacher")
        assert self_data.prompts_of(source, Console()) == [expected.get(name, [user])], name
        assert "1 rows are not answered: tools" in capsys.readouterr().out.replace("\n", "")
    for row, message in (({"messages": [{"content": "w1"}]}, "row 0 .* role and"), ({"text": "w1"}, "questions")):
        with pytest.raises(UserError, match=message):
            self_data.prompts_of(DataSource(path=str(_file(tmp_path, [row])), answers="teacher"), Console())
    with pytest.raises(ValueError, match="format=alpaca changes nothing"):
        DataSource(path="rows.jsonl", answers="teacher", format="alpaca")


def _file(folder, given):
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in given))
    return file
