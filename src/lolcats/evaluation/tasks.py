"""lm-eval's tasks by name, some of them on data from a local folder.

Prompts, choices and metrics are read from lm-eval's own task files; with local data only the rows come from elsewhere.
`NAME_4k` puts 4 * 1024 tokens of other code before each question, `NAME_8shot` changes the number of shots.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jinja2

from lolcats.errors import UserError
from lolcats.evaluation.distances import TOPICS_SHOTS, put_behind_code, topics
from lolcats.evaluation.programs import before_fence, load_metric


@dataclass(frozen=True)
class KnownTask:
    """A task with a title, a metric of its own and local data."""

    title: str
    metric: str
    """One of lm-eval's, with its filter where there are several: METRIC,FILTER."""
    shots: int | None
    """None: as lm-eval's task has it."""
    splits: tuple[str, ...]
    """The split that is measured, and that of the examples before it."""
    folder: str | None = None
    """Of the data; None: as the task is called."""


ANSWER = "exact_match,flexible-extract"  # the last number
KNOWN_TASKS = {  # by the name of lm-eval's task or group; first the paper's (arXiv:2410.10254, section 4.1)
    "piqa": KnownTask("PIQA", "acc", 0, ("validation",)),
    "arc_easy": KnownTask("ARC-e", "acc", 0, ("test",)),
    "arc_challenge": KnownTask("ARC-c (norm)", "acc_norm", 0, ("test",)),
    "hellaswag": KnownTask("HellaSwag (norm)", "acc_norm", 0, ("validation",)),
    "winogrande": KnownTask("WinoGrande", "acc", 0, ("validation",)),
    "mmlu": KnownTask("MMLU (5-shot)", "acc", 5, ("test", "dev")),
    "humaneval": KnownTask("HumanEval", "pass@1", None, ("test",)),
    "mbpp": KnownTask("MBPP", "pass_at_1", None, ("test",)),
    "gsm8k": KnownTask("GSM8K", ANSWER, None, ("test", "train")),
    "gsm8k_cot": KnownTask("GSM8K CoT", ANSWER, None, ("test",), "gsm8k"),
    "gsm8k_cot_zeroshot": KnownTask("GSM8K CoT (0-shot)", ANSWER, None, ("test", "train"), "gsm8k"),
    "ifeval": KnownTask("IFEval", "prompt_level_strict_acc", None, ("train",)),
    "topics": KnownTask("topics", "acc", TOPICS_SHOTS, ("test",), "mmlu"),  # not lm-eval's
}
PAPER_NAMES = tuple(KNOWN_TASKS)[:6]
OWN = ("recall", "passkey", "ruler", "perplexity", "esl")
"""Evaluations that are no tasks of lm-eval, and its RULER, whose texts are written for each tokenizer and length."""


@functools.cache
def task_manager(known_only: bool = False) -> Any:
    """lm-eval's index of tasks.

    Args:
        known_only: of `KNOWN_TASKS` alone, because reading all of lm-eval's definitions takes seconds.
    """
    try:
        import lm_eval.tasks as tasks
    except ImportError as error:
        raise UserError("these tasks need lm-eval: pip install 'lolcats[eval]'") from error
    if not known_only:
        return tasks.TaskManager()
    names = ("piqa", "arc", "hellaswag", "winogrande", "mmlu/default", "humaneval", "mbpp", "gsm8k", "ifeval")
    folders = [Path(tasks.__file__).parent / name for name in names]
    return tasks.TaskManager(include_path=folders, include_defaults=False)


def parts_of(name: str) -> tuple[str, int, int | None]:
    """The task, the tokens of other code before its questions, and the number of shots if it is asked for."""
    base, thousands, shots = re.findall(r"^(.+?)(?:_(\d+)k)?(?:_(\d+)shot)?$", name)[0]
    if base not in KNOWN_TASKS:
        return name, 0, None  # lm-eval's, which may end so
    return base, 1024 * int(thousands or 0), int(shots) if shots else None


def check_names(names: list[str], data_dir: str | None, run_code: bool = False) -> None:
    """Refuse unknown tasks, tasks that a local folder does not hold, and programs of the model that may not run."""
    bases = {name: parts_of(name)[0] for name in names}
    known = task_manager(known_only=set(bases.values()) <= set(KNOWN_TASKS)).task_index
    for name, base in bases.items():
        if base not in {*known, *KNOWN_TASKS}:
            raise UserError(
                f"no task {name!r}: neither one of lm-eval, of which the paper's are {', '.join(PAPER_NAMES)};"
                f" nor {', '.join(OWN)}, topics"
            )
        if data_dir is not None:
            task_files(data_dir, base)
        if not run_code and base in known and (known[base].cfg or {}).get("unsafe_code"):
            raise UserError(
                f"{name} runs programs that the model writes, in processes with limits of time and memory but with your"
                " rights: give --run-code on a machine that may be lost"
            )


def load_tasks(
    names: list[str], data_dir: str | None, seed: int, tokenizer: Any = None, chat: bool = False
) -> dict[str, Any]:
    """lm-eval's task or group of each name; a tag, and a group without a score of its own, stand for their tasks.

    Args:
        data_dir: folder with `TASK/SPLIT.jsonl(.gz)`, see docs/evaluation.md; None: the hub.
        seed: of few-shot examples, for tasks that draw them.
        tokenizer: counts the tokens of other code.
        chat: take `NAME_instruct` for NAME where lm-eval has it.
    """
    import evaluate

    tasks: dict[str, Any] = {}
    try:
        with patch.object(evaluate, "load", functools.partial(load_metric, evaluate.load)):
            for name in names:
                tasks |= _load(name, data_dir, tokenizer, chat)
    except (ImportError, OSError, ValueError, KeyError, IndexError, jinja2.TemplateError) as error:
        place = "from the hub; give --data-dir for local data" if data_dir is None else f"from {data_dir}"
        raise UserError(f"cannot load {', '.join(names)} {place}: {type(error).__name__}: {error}") from error
    for task in flat(tasks)["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=seed)
    return tasks


def flat(tasks: dict[str, Any]) -> Any:
    """Tasks and groups in the form that `lm_eval.evaluator.evaluate` takes."""
    return task_manager(known_only=True).load(list(tasks.values()))


def _load(name: str, data_dir: str | None, tokenizer: Any, chat: bool) -> dict[str, Any]:
    """The task or group of a name, in the report under that name; of a tag, its tasks."""
    from lm_eval.api.group import AggMetricConfig, Group
    from lm_eval.api.task import ConfigurableTask

    base, tokens, shots = parts_of(name)
    known = KNOWN_TASKS.get(base)
    manager = task_manager(known_only=known is not None)
    source = f"{base}_instruct" if chat and f"{base}_instruct" in manager.task_index else base
    if known is None:
        found = manager.load(source)
        group = found["groups"].get(source)
        return {name: group} if group is not None and group.has_aggregation else found["tasks"]
    shots = known.shots if shots is None else shots
    splits = {} if data_dir is None else {split: _rows(file) for split, file in task_files(data_dir, base).items()}
    if base == "topics":
        members = {base: ConfigurableTask(config={"task": base, **topics(splits.get("test"), shots or TOPICS_SHOTS)})}
    else:
        changes = _subjects(splits) if base == "mmlu" else {source: _local(splits) if splits else {}}
        given: dict[str, Any] = {} if shots is None else {"num_fewshot": shots}
        if source == "mbpp_instruct":  # lm-eval's own filter takes a first "def" for the block's language
            given["filter_list"] = [{"name": "code", "filter": [{"function": "custom", "filter_fn": before_fence}]}]
        # As members of a group, because that is how lm-eval changes fields of its tasks' definitions.
        fields = [{"task": member, **given, **change} for member, change in changes.items()]
        members = manager.load({"group": "chosen", "task": fields})["tasks"]
    group = Group(name, aggregate_metric_list=[AggMetricConfig("acc")])
    for member, task in members.items():
        task.set_config(key="task_alias", value=member)
        task.set_config(key="task", value=member + name.removeprefix(base) if base == "mmlu" else name)
        if tokens:
            put_behind_code(task, tokenizer, tokens)
        group.add(task)
    measured = group if base == "mmlu" else task
    measured.main_metric = known.metric
    return {name: measured}


def _subjects(splits: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """MMLU's tasks, of local data for all subjects that they have, and what to change in each."""
    members = [member for member in task_manager(known_only=True).all_subtasks if member.startswith("mmlu_")]
    if not splits:
        return {member: {} for member in members}
    subjects = sorted({str(row["subject"]) for row in splits["test"]})
    if unknown := [subject for subject in subjects if f"mmlu_{subject}" not in members]:
        raise UserError(f"mmlu: unknown subject {unknown[0]!r}; expected names like 'anatomy'")
    return {f"mmlu_{subject}": _local(splits, subject) for subject in subjects}


def task_files(data_dir: str | Path, name: str) -> dict[str, Path]:
    """The files that a task needs of a local folder, by split."""
    if name not in KNOWN_TASKS:
        raise UserError(
            f"task {name!r} has no local data: --data-dir serves {', '.join(KNOWN_TASKS)}; leave --data-dir out to read"
            " others from the hub"
        )
    root, splits = Path(data_dir).expanduser(), KNOWN_TASKS[name].splits
    name = KNOWN_TASKS[name].folder or name
    folder = root / name if (root / name).is_dir() else root / "eval" / name
    files = {}
    for split in splits:
        found = [file for file in (folder / f"{split}.jsonl", folder / f"{split}.jsonl.gz") if file.is_file()]
        if not found:
            raise UserError(f"--data-dir {data_dir}: expected {name}/{split}.jsonl or {name}/{split}.jsonl.gz in it")
        files[split] = found[-1]
    return files


def data_hashes(data_dir: str | Path, names: list[str]) -> dict[str, str]:
    """sha256 of the files that tasks are measured on."""
    return {
        f"{name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest()
        for name in names
        for file in task_files(data_dir, parts_of(name)[0]).values()
    }


def _rows(file: Path) -> list[dict[str, Any]]:
    from datasets import Dataset
    from datasets.exceptions import DatasetsError

    try:
        return Dataset.from_json(str(file)).to_list()
    except (DatasetsError, OSError, ValueError, StopIteration) as error:  # the last of an empty file
        raise UserError(f"{file}: expected a JSON object a line ({error.__cause__ or error!r})") from error


def _local(splits: dict[str, list[dict[str, Any]]], subject: str | None = None) -> dict[str, Any]:
    """What to change in lm-eval's task so that it reads `splits`, and opens no others."""
    from datasets import Dataset

    chosen = {split: [row for row in rows if subject in (None, row.get("subject"))] for split, rows in splits.items()}
    data = {split: Dataset.from_list(rows) for split, rows in chosen.items()}
    unused = {f"{kind}_split": None for kind in ("training", "validation") if kind not in data}
    return {**unused, "custom_dataset": lambda **_: data}
