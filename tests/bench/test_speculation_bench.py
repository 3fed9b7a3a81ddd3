"""benchmarks/speculation.py with a tiny model, on a CPU."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil

import pytest
import speculation
import torch
from rich.console import Console
from speculation import (
    SpeculationBench,
    expected_tokens,
    mean_accepted,
    ngram_lookup,
    print_table,
    prompts_of,
    run,
    trained_draft,
)
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert

QUIET = Console(quiet=True)
TEMPLATE = (
    "{% for message in messages %}w1 {{ message['content'] }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"
)


@pytest.fixture
def bench(model_dir, tmp_path):
    """Texts of words, and a tokenizer with a chat template."""
    shutil.copytree(model_dir, tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    words = [f"w{number * 7 % 60}" for number in range(50)]
    rows = [{"page": " ".join(words[i:]), "instruction": f"w{i}", "input": "", "output": "w3 w4"} for i in range(6)]
    for file, name in speculation.TEXTS.values():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(tmp_path / file, "wt") as lines:
            lines.writelines(
                json.dumps(row | {name: row["page" if name != "instruction" else name]}) + "\n" for row in rows
            )
    return SpeculationBench(
        sections=("acceptance",), model=str(tmp_path / "model"), data=str(tmp_path), contexts=(24,), prompts=1,
        new_tokens=24, exact="0.1", windows=(4,), sinks=1, drafted=4, dtype="float32", device="cpu",
    )  # fmt: skip


def test_acceptance(bench, monkeypatch):
    reports = []
    report = run(bench, QUIET, lambda report: reports.append(json.loads(json.dumps(report))))
    rows = report["acceptance"]
    assert [row["kind"] for row in rows] == list(speculation.TEXTS)
    assert len(reports) == 1 + len(rows)
    for row in rows:
        assert "error" not in row
        assert row["differs"] == []
        assert set(row["accepted"]) == {"1 heads, window 4", "window 4", "n-gram lookup"}
        assert 16 <= row["prompt_tokens"] <= 26
        places = row["prompt_tokens"] + bench.new_tokens + 1  # one takes padding
        assert row["cache_bytes"]["window 4"] * places == row["cache_bytes"]["softmax"] * (places + bench.drafted)
    assert 0 < mean_accepted(rows, "window 4") < 4
    sampled = run(dataclasses.replace(bench, temperature=2.0), QUIET)["acceptance"]
    assert 0 < mean_accepted(sampled, "window 4") != mean_accepted(rows, "window 4")
    assert all(row["differs"] == [] for row in sampled)
    console = Console(record=True, width=200, quiet=True)
    print_table(report, console)
    monkeypatch.setattr(speculation, "accepted", lambda *args: 1 / 0)
    assert run(bench, QUIET)["acceptance"][0]["error"] == "ZeroDivisionError: division by zero"


def test_halves_of_the_texts_differ(bench):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(bench.model)
    halves = (dataclasses.replace(bench, half=half) for half in ("development", "report"))
    first, second = (prompts_of(half, tokenizer, "books", 24) for half in halves)
    assert first != second
    assert first == prompts_of(dataclasses.replace(bench, half="development"), tokenizer, "books", 24)


def test_ngram_lookup():
    prompt = [1, 2, 3, 4, 5, 6, 7, 9]
    assert ngram_lookup(prompt, [1, 2, 3, 4, 8, 5, 6], 3) == [3]
    assert ngram_lookup(prompt, [1, 2, 9, 4, 8, 5, 6], 3) == [1, 0, 0]
    assert ngram_lookup([1], [2, 3, 4, 5, 6], 3) == [0, 0]


@torch.no_grad()
def test_trained_draft(linearized):
    """Each round's count is that of a draft which reads everything anew."""
    model = linearized(exact=["0.0"])[0].eval()
    prompt, answer = [5, 6, 7, 8, 9], []
    for number in range(40):
        best = int(model(torch.tensor([prompt + answer])).logits[0, -1].argmax())
        answer.append(best if number % 7 else (best + 1) % 50)
    expected, at = [], 1
    while at + 4 <= len(answer):
        drafted: list[int] = []
        for _ in range(4):
            drafted.append(int(model(torch.tensor([prompt + answer[:at] + drafted])).logits[0, -1].argmax()))
        differs = [i for i in range(4) if drafted[i] != answer[at + i]]
        expected.append(differs[0] if differs else 4)
        at += expected[-1] + 1
    assert trained_draft(model, prompt, answer, 4) == expected
    assert len(set(expected)) > 1


@pytest.fixture(params=["original", "linearized"])
def lookup_bench(request, bench, tmp_path):
    if request.param == "linearized":
        model = AutoModelForCausalLM.from_pretrained(bench.model)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(bench.model)
        convert(model, AttentionConfig(window_size=8, exact=("0.1",))).save_pretrained(tmp_path / "linearized")
        tokenizer.save_pretrained(tmp_path / "linearized")
        bench = dataclasses.replace(bench, model=str(tmp_path / "linearized"))
    return dataclasses.replace(bench, sections=("lookup", "checks"), context=20, batches=(1, 3), steps=3)


def test_lookup(lookup_bench):
    kinds = ("books", "summaries")
    report = run(dataclasses.replace(lookup_bench, kinds=kinds), QUIET)
    rows = report["lookup"]
    assert [(row["kind"], row["batch"], row["decoding"]) for row in rows] == [
        (kind, batch, name) for kind in kinds for batch in (1, 3) for name in ("plain", "lookup")
    ]
    assert all(row["tokens_s"] > 0 and row["same_answers"] == row["answers"] == row["batch"] for row in rows)
    assert rows[1]["steps"] <= rows[0]["steps"]
    for row, batch in zip(report["checks"], (1, 3), strict=True):
        assert row["batch"] == batch
        assert list(row["check_ms"]) == list(row["assumed_in_steps"]) == ["2", "3", "5"]
        assert all(milliseconds > 0 for milliseconds in (row["step_ms"], *row["check_ms"].values()))
    print_table(report, QUIET)


def test_end_to_end_and_steps(bench):
    tiny = dataclasses.replace(
        bench, sections=("end_to_end", "steps"), context=20, batches=(2,), shape="tiny", step_contexts=(30,), steps=2,
        rates=(0.5,), exact_share=0.5,
    )  # fmt: skip
    report = run(tiny, QUIET)
    assert [row["decoding"] for row in report["end_to_end"]] == ["softmax", "draft", "adaptive draft"]
    assert all(row["tokens_s"] > 0 for row in report["end_to_end"])
    (row,) = report["steps"]
    cost = 4 * row["draft_ms"] + row["check_ms"]
    assert row["speed_up"]["0.5"] == pytest.approx(expected_tokens(0.5, 4) * row["step_ms"] / cost)
    assert 0.3 < row["predicted"]["0.5"] < 2
    print_table(report, QUIET)


def test_a_row_has_a_time_limit():
    row = {}
    with speculation.time_limit(row, 1):
        while True:
            pass
    assert row == {"error": "TimeoutError: took more than 1 s"}
