"""vLLM writes a model's own data as the engine does, in a process of its own."""

import json
from importlib.metadata import version

import pytest
from rich.console import Console
from test_self_data import TEMPLATE
from tiny_base import write_base

from lolcats import self_data
from lolcats.config import DataSource, ModelSection

VLLM = f"vllm {version('vllm')}"


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder and a type; heads are as wide as vLLM takes them."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr(self_data, "can_use_vllm", lambda section: True)
    write_base(tmp_path / "chat", [f"w{n}" for n in range(60)], 128, TEMPLATE, hidden_size=128)
    return {"path": str(tmp_path / "chat"), "dtype": "float32", "device": "auto"}


def test_greedy_answers_are_those_of_the_engine(model, tmp_path, monkeypatch):
    monkeypatch.setattr(self_data, "ANSWER", {"temperature": 0.0})
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "w{n} w{n // 2}"}}\n' for n in range(60)))
    answers = []
    for engine in (VLLM, "lolcats"):
        monkeypatch.setenv("LOLCATS_CACHE", str(tmp_path / engine))
        source = DataSource(path=str(tmp_path / "prompts.jsonl"), answers="teacher")
        file, report = self_data.written_file(ModelSection(**model), source, 0, Console(quiet=True))
        assert report["engines"] == [engine]
        rows = map(json.loads, file.with_suffix(".samples").read_text().splitlines())
        answers.append({row["index"]: (row["text"].strip(), row["finished"], row["tokens"]) for row in rows})
        monkeypatch.setattr(self_data, "can_use_vllm", lambda section: False)
    assert answers[0] == answers[1]
    assert {finished for _, finished, _ in answers[0].values()} == {True, False}


def test_linearize_without_data(run, model, tmp_path):
    source = {"sources": [{"path": "self", "max_rows": 60}], "sequence_length": 32, "validation_rows": 4}
    short = {"data": source, "transfer": {"max_steps": 2}, "adjust": {"max_steps": 2}}
    (about,) = run(tmp_path / "out", short, {"model": model})["data"]["written"]
    assert about["engines"] == [VLLM]
    assert about["rows"] > 5
