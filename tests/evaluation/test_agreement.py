"""benchmarks/eval_agreement.py: both ways of scoring are run and compared."""

from __future__ import annotations

import argparse
import importlib
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


def given(eval_data, limit=None):
    return argparse.Namespace(data_dir=str(eval_data), limit=limit, batch_size=4)


def test_same_scores_and_results(script, linear_model, tokenizer, eval_data, capsys):
    report = script.compare(linear_model, tokenizer, given(eval_data))
    assert list(report["tasks"]) == ["piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande", "mmlu"]
    for row in report["tasks"].values():
        assert row["scores"] > 0
        assert row["largest_difference"] < 1e-3
        assert row["greedy_differs"] == 0
        assert row["lolcats"] == row["hf"]
    script.print_table(report, script.Console(width=120))
    assert "lolcats:" in capsys.readouterr().out


def test_a_difference_is_seen(script, linear_model, tokenizer, eval_data, monkeypatch):
    honest = HFLM._loglikelihood_tokens

    def off(self, requests, **options):
        scores = honest(self, requests, **options)
        return [(score - 1.0, not greedy) for score, greedy in scores] if type(self) is HFLM else scores

    monkeypatch.setattr(HFLM, "_loglikelihood_tokens", off)
    report = script.compare(linear_model, tokenizer, given(eval_data, limit=3))
    row = report["tasks"]["piqa"]
    assert row["greedy_differs"] == row["scores"] == 3
    assert row["largest_difference"] == pytest.approx(1.0, abs=1e-3)
    assert "hf" not in row
