"""Several models on several evaluations, and the tables made of it."""

import copy
import json
import sys
from unittest.mock import Mock

import pytest
import torch

from lolcats.config import DataSection
from lolcats.errors import UserError
from lolcats.evaluation import ruler, suite
from lolcats.evaluation.options import EvalOptions
from lolcats.evaluation.suite import evaluate_models
from lolcats.evaluation.tables import add_averages, tables
from lolcats.evaluation.tasks import PAPER_NAMES, task_manager


@pytest.fixture
def load(softmax_model, linear_model, tokenizer):
    models = {"teacher": softmax_model, "student": linear_model}
    return lambda path: (copy.deepcopy(models[path]), tokenizer)  # evaluating changes a model


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"The {word} is green. The sky is blue over it. " * 12 for word in "abcdefgh"))
    return DataSection.model_validate({"sources": [{"path": str(file)}], "sequence_length": 64})


@pytest.mark.parametrize("task", ["ruler", "piqa"])
def test_without_lm_eval_the_extra_is_named(task, monkeypatch):
    definitions = ruler._definition, task_manager
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    for cached in definitions:
        cached.cache_clear()
    with pytest.raises(UserError, match="pip install 'lolcats"):
        suite.check(EvalOptions(tasks=(task,)))
    for cached in definitions:
        cached.cache_clear()


def test_task_lists():
    assert EvalOptions().tasks == PAPER_NAMES
    assert EvalOptions(tasks="passkey, mmlu,paper").tasks == ("passkey", "mmlu", *PAPER_NAMES[:5])
    with pytest.raises(ValueError, match="expected names"):
        EvalOptions(tasks=" , ")


def test_everything_at_once(load, eval_data, text):
    pytest.importorskip("lm_eval", reason="lolcats[eval] is not installed")
    tasks = (*PAPER_NAMES, "passkey", "perplexity")
    options = EvalOptions(tasks=tasks, data_dir=str(eval_data), limit=3, batch_size=16, lengths=(260,), data=text)
    seen = []
    report = evaluate_models(["teacher", "student"], load, options, note=seen.append)
    assert json.loads(json.dumps(report)) == report
    assert seen == [f"{name}: {part}" for name in ("teacher", "student") for part in ("tasks", "passkey", "perplexity")]
    teacher, student = report["models"]
    assert set(teacher["tasks"]) == set(PAPER_NAMES)
    assert "attention" not in teacher
    assert student["attention"]["linear_length_cap"] == 0
    assert teacher["perplexity"]["tokens"] == student["perplexity"]["tokens"] == 3 * 63
    assert report["provenance"]["versions"]["lm-eval"]
    assert len(report["provenance"]["data_sha256"]) == 7
    assert report["settings"]["data"]["sequence_length"] == 64
    shown = tables(report)
    assert shown[0][2] == [["student", "terraced", "8", "0", "hedgehog", "0", "-"]]
    assert shown[1][1][-3:] == ["MiB at 1k", "MiB at 8k", "MiB at 32k"]
    assert [title.partition(" ")[0] for title, *_ in shown] == ["Attention", "Tasks", "Passkeys", "Perplexity"]
    again = evaluate_models(["teacher", "student"], load, options)
    assert [row["tasks"] for row in again["models"]] == [row["tasks"] for row in report["models"]]


def cell(value, stderr=0.01):
    return {"value": value, "stderr": stderr}


def scored(model, values):
    row = {"model": model, "tasks": {name: cell(value) for name, value in zip(PAPER_NAMES, values, strict=True)}}
    add_averages(row)
    return row


def test_averages_and_differences():
    rows = [scored("base", [0.8, 0.6, 0.4, 0.5, 0.7, 0.3]), scored("ours", [0.7, 0.6, 0.3, 0.5, 0.7, 0.2])]
    assert rows[0]["averages"]["average"]["value"] == pytest.approx(0.55)
    assert rows[0]["averages"]["average_without_mmlu"]["value"] == pytest.approx(0.6)
    assert rows[0]["averages"]["average"]["stderr"] == pytest.approx(0.01 / 6**0.5)
    ((title, columns, body),) = tables({"models": rows, "settings": {"limit": None}})
    assert columns[-2:] == ["Avg.", "Avg. (no MMLU)"]
    assert [line[0] for line in body] == ["base", "ours", "  difference", "  % of the Transformer"]
    assert body[0][1] == "80.00 ± 1.00"
    assert body[2][1:] == ["-10.00", "+0.00", "-10.00", "+0.00", "+0.00", "-10.00", "-5.00", "-4.00"]
    assert body[3][6] == "66.7"
    assert "first" not in title


def test_no_average_of_a_part():
    row = {"model": "m", "tasks": {"piqa": cell(0.5, None)}}
    add_averages(row)
    assert row["averages"] == {}
    ((title, _, body),) = tables({"models": [row], "settings": {"limit": 7}})
    assert "first 7 questions" in title
    assert body == [["m", "50.00"]]


def test_mistakes_are_found_before_loading():
    with pytest.raises(UserError, match="--data"):
        evaluate_models(["absent"], lambda path: pytest.fail("loaded"), EvalOptions(tasks="perplexity"))
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        EvalOptions(tasks="passkey", lengths="0")


def test_out_of_memory_says_what_to_do(load, monkeypatch):
    monkeypatch.setattr(suite, "recall_accuracy", Mock(side_effect=torch.OutOfMemoryError("no")))
    with pytest.raises(UserError, match="--batch-size"):
        evaluate_models(["teacher"], load, EvalOptions(tasks=("passkey",)))
