"""lm-eval's own vLLM model takes a linearized folder: scores of each answer as transformers gives them."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
import vllm
from test_vllm_answers import EXACT_HEADS
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = {
    "piqa/validation": [
        {
            "goal": f"To dry {n} wet boots",
            "sol1": "stuff them with newspaper",
            "sol2": f"fill them {n} times",
            "label": 0,
        }
        for n in range(2, 7)
    ],
    "arc_easy/test": [
        {
            "id": f"q{n}",
            "question": f"Which of these is number {n} of the things that float?",
            "choices": {"text": ["granite", "a leaf", "iron"], "label": ["A", "B", "C"]},
            "answerKey": "ABC"[n % 3],
        }
        for n in range(5)
    ],
}


@pytest.fixture
def tasks(tmp_path: Path) -> dict:
    from lolcats.evaluation.tasks import load_tasks

    for name, rows in ROWS.items():
        file = tmp_path / f"{name}.jsonl"
        file.parent.mkdir()
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_tasks(["piqa", "arc_easy"], str(tmp_path), 0)


def scores(lm, tasks: dict) -> tuple[dict[str, float], list[tuple[float, bool]]]:
    """Accuracy of each task, and log-likelihood of each choice with whether it is the greedy answer."""
    from lm_eval import evaluator

    from lolcats.evaluation.lm_eval_run import lm_eval_set_up
    from lolcats.evaluation.tasks import flat

    with lm_eval_set_up():
        found = evaluator.evaluate(lm=lm, task_dict=flat(dict(tasks)), bootstrap_iters=0, log_samples=True)
    accuracy = {name: found["results"][name]["acc,none"] for name in found["samples"]}
    samples = [sample for name in sorted(found["samples"]) for sample in found["samples"][name]]
    return accuracy, [answer for sample in samples for answer in sample["filtered_resps"]]


def test_task_numbers(folder, tasks, monkeypatch) -> None:
    from vllm import LLM  # noqa: F401  # chooses its platform by the distribution's version, too
    from vllm_kit import stop

    from lolcats.evaluation.lm_eval_run import LolcatsLM

    # lm-eval asks for the version of the distribution `vllm`, which the CPU build is not.
    version = importlib.metadata.version
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda x: vllm.__version__ if x == "vllm" else version(x))
        from lm_eval.models.vllm_causallms import VLLM

    path = folder(**EXACT_HEADS)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    expected, right = scores(LolcatsLM(model, tokenizer=AutoTokenizer.from_pretrained(path), device="cpu"), tasks)
    settings = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    found, answers = scores(VLLM(str(path), **settings, gpu_memory_utilization=0.1), tasks)
    stop()
    assert found == expected
    assert len(answers) == 25
    for (logprob, is_greedy), (wanted, wanted_greedy) in zip(answers, right, strict=True):
        assert logprob == pytest.approx(wanted, abs=1e-3)  # float32 sums of some twenty tokens
        assert is_greedy == wanted_greedy
    assert len({round(logprob, 2) for logprob, _ in answers}) > 20  # not the same everywhere
