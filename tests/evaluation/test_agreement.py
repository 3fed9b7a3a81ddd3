"""benchmarks/eval_agreement.py: both ways of scoring are run and compared."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lolcats[eval] is not installed")

from lm_eval.models.huggingface import HFLM


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield importlib.import_module("eval_agreement")
    del sys.modules["eval_agreement"]


def compared(script, model, tokenizer, eval_data, name, limit=None):
    arguments = argparse.Namespace(data_dir=str(eval_data), limit=limit, batch_size=4)
    return script.compare(name, model, tokenizer, arguments)


@pytest.mark.parametrize("name", ["piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande", "mmlu"])
def test_same_scores_and_results(script, linear_model, tokenizer, eval_data, name):
    row = compared(script, linear_model, tokenizer, eval_data, name)
    assert row["scores"] > 0
    assert row["largest_difference"] < 1e-3
    assert row["greedy_differs"] == 0
    assert row["lolcats"] == row["hf"]


def test_a_difference_is_seen(script, linear_model, tokenizer, eval_data, monkeypatch):
    honest = HFLM._loglikelihood_tokens

    def off(self, requests, **options):
        scores = honest(self, requests, **options)
        return [(score - 1.0, not greedy) for score, greedy in scores] if type(self) is HFLM else scores

    monkeypatch.setattr(HFLM, "_loglikelihood_tokens", off)
    row = compared(script, linear_model, tokenizer, eval_data, "piqa", limit=3)
    assert row["greedy_differs"] == row["scores"] == 3
    assert row["largest_difference"] == pytest.approx(1.0, abs=1e-3)
    assert "hf" not in row


def test_goes_on_after_the_tasks_it_has(script, linear_model, tokenizer, eval_data, tmp_path, monkeypatch, capsys):
    file = tmp_path / "agreement.json"
    asked = []

    def run(*tasks, limit="2"):
        options = ["--model", "M", "--data-dir", str(eval_data), "--limit", limit, "--json", str(file)]
        monkeypatch.setattr(sys, "argv", ["eval_agreement.py", *options, "--tasks", *tasks])
        monkeypatch.setattr(script, "load_base_model", lambda *a, **k: (linear_model, tokenizer))
        monkeypatch.setattr(script, "compare", lambda name, *rest: asked.append(name) or compare(name, *rest))
        script.main()

    compare = script.compare
    run("piqa")
    run("piqa", "winogrande")
    assert asked == ["piqa", "winogrande"]
    assert list(json.loads(file.read_text())["tasks"]) == ["piqa", "winogrande"]
    assert "winogrande" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run("arc_easy", limit="3")
    assert "has other settings" in capsys.readouterr().err
