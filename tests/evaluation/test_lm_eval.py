"""The paper's six tasks on small records: the same results as plain lm-eval."""

import json
import shutil

import pytest

pytest.importorskip("lm_eval", reason="lolcats[eval] is not installed")

from datasets import Dataset
from lm_eval import evaluator
from lm_eval.api.group import AggMetricConfig, Group
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM

from lolcats.errors import UserError
from lolcats.evaluation.lm_eval_run import lm_eval_set_up, run_tasks
from lolcats.evaluation.tasks import PAPER_NAMES, check_names, flat, load_tasks

NAMES = list(PAPER_NAMES)


def test_task_results_are_those_of_the_hf_model(eval_data, linear_model, tokenizer):
    found = run_tasks(linear_model, tokenizer, load_tasks(NAMES, str(eval_data), seed=0), batch_size=4)
    with lm_eval_set_up():
        loaded = flat(load_tasks(NAMES, str(eval_data), seed=0))
        plain = HFLM(pretrained=linear_model, tokenizer=tokenizer, batch_size=2, device="cpu")
        expected = evaluator.evaluate(lm=plain, task_dict=loaded, bootstrap_iters=10, log_samples=False)["results"]
    for name in ("piqa", "arc_easy", "winogrande"):
        assert found[name]["value"] == pytest.approx(expected[name]["acc,none"])
        assert found[name]["stderr"] == pytest.approx(expected[name]["acc_stderr,none"])
    for name in ("arc_challenge", "hellaswag"):
        assert found[name]["metric"] == "acc_norm"
        assert found[name]["value"] == pytest.approx(expected[name]["acc_norm,none"])
    subjects = [expected[f"mmlu_{subject}"]["acc,none"] for subject in ("anatomy", "astronomy")]
    assert found["mmlu"]["value"] == pytest.approx((4 * subjects[0] + 5 * subjects[1]) / 9)  # by questions
    assert (found["mmlu"]["shots"], found["mmlu"]["questions"]) == (5, 9)
    assert found["mmlu"]["stderr"] > 0
    json.dumps(found)


def test_tasks_may_be_given_as_objects(linear_model, tokenizer):
    """Generated answers, and a group that is averaged without regard to its tasks' sizes."""

    def task(name, texts):
        rows = Dataset.from_list([{"text": text, "answer": "a river"} for text in texts])
        fields = {"output_type": "generate_until", "test_split": "test", "num_fewshot": 0}
        fields |= {"doc_to_text": "{{text}}", "doc_to_target": "{{answer}}", "metric_list": [{"metric": "exact_match"}]}
        fields |= {"generation_kwargs": {"until": [], "max_gen_toks": 4}, "custom_dataset": lambda **_: {"test": rows}}
        built = ConfigurableTask(config={"task": name, **fields})
        built.process_results = lambda doc, results: {"exact_match": float("sky" in doc["text"] and bool(results[0]))}
        return built

    single, group = task("single", ["The sky is", "Which"]), Group("group", None, [AggMetricConfig("exact_match")])
    group.aggregate_metric_list[0].weight_by_size = False
    for part in (task("first", ["The sky", "The sky is", "Which"]), task("second", ["Which river"])):
        group.add(part)
    found = run_tasks(linear_model, tokenizer, {"single": single, "group": group}, batch_size=2)
    assert (found["single"]["metric"], found["single"]["questions"]) == ("exact_match", 2)
    assert found["single"]["value"] == 0.5
    assert (found["group"]["value"], found["group"]["questions"]) == (pytest.approx((2 / 3 + 0) / 2), 4)
    assert {name: part["questions"] for name, part in found["group"]["parts"].items()} == {"first": 3, "second": 1}


@pytest.mark.parametrize(
    ("names", "removed", "message"),
    [
        (["arc_easy", "arc_easyer"], None, "no task 'arc_easyer'.* nor recall, passkey,"),
        (["lambada_openai"], None, "no local data"),
        (["piqa"], "piqa", r"expected piqa/validation\.jsonl"),
        (["mmlu"], "mmlu/dev.jsonl", r"expected mmlu/dev\.jsonl"),
    ],
)
def test_missing_tasks_and_data(eval_data, tmp_path, names, removed, message):
    folder = tmp_path / "data"
    shutil.copytree(eval_data, folder)
    if removed is not None:
        gone = folder / removed
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with pytest.raises(UserError, match=message):
        check_names(names, str(folder))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a JSON object a line"),
        ('{"goal": 1}\nnot json\n', "expected a JSON object a line"),
        ("[1]\n", "cannot load piqa"),
        ('{"goal": "a"}\n', "cannot load piqa"),
    ],
)
def test_broken_data(tmp_path, text, message):
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa" / "validation.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        load_tasks(["piqa"], str(tmp_path), seed=0)
