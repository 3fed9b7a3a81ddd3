"""lm-eval's tasks by name; the paper's on data from the hub or from a local folder.

Prompts, choices and metrics are read from lm-eval's own task files; with local data only the rows come from
elsewhere.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lolcats.errors import UserError


@dataclass(frozen=True)
class PaperTask:
    """A row of the paper's tables (arXiv:2410.10254, section 4.1)."""

    title: str
    metric: str
    shots: int
    splits: tuple[str, ...]
    """The split that is measured, and that of the examples before it."""


PAPER_TASKS = {  # by the name of lm-eval's task or group
    "piqa": PaperTask("PIQA", "acc", 0, ("validation",)),
    "arc_easy": PaperTask("ARC-e", "acc", 0, ("test",)),
    "arc_challenge": PaperTask("ARC-c (norm)", "acc_norm", 0, ("test",)),
    "hellaswag": PaperTask("HellaSwag (norm)", "acc_norm", 0, ("validation",)),
    "winogrande": PaperTask("WinoGrande", "acc", 0, ("validation",)),
    "mmlu": PaperTask("MMLU (5-shot)", "acc", 5, ("test", "dev")),
}
PAPER_NAMES = tuple(PAPER_TASKS)
OWN = ("recall", "ruler", "passkey", "esl")
"""Evaluations that are no tasks of lm-eval, or that are written for each tokenizer."""


@functools.cache
def task_manager(paper_only: bool = False) -> Any:
    """lm-eval's index of tasks.

    Args:
        paper_only: of the paper's tasks alone, because reading all of lm-eval's definitions takes seconds.

    Raises:
        UserError: lm-eval is not installed.
    """
    try:
        import lm_eval.tasks as tasks
    except ImportError as error:
        raise UserError(
            "these tasks run through lm-eval, which is not installed: pip install 'lolcats[eval]'"
        ) from error
    if not paper_only:
        return tasks.TaskManager()
    root = Path(tasks.__file__).parent
    folders = [root / name for name in ("piqa", "arc", "hellaswag", "winogrande", "mmlu/default")]
    return tasks.TaskManager(include_path=folders, include_defaults=False)


def check_names(names: list[str], data_dir: str | None) -> None:
    """Refuse unknown tasks, and tasks that a local folder does not hold.

    Raises:
        UserError: as said, or lm-eval is missing.
    """
    known = task_manager(paper_only=set(names) <= set(PAPER_NAMES)).task_index
    for name in names:
        if name not in known:
            raise UserError(
                f"no task {name!r}: neither one of lm-eval, of which the paper's are {', '.join(PAPER_NAMES)};"
                f" nor {', '.join(OWN)}"
            )
        if data_dir is not None:
            task_files(data_dir, name)


def load_tasks(names: list[str], data_dir: str | None, seed: int) -> dict[str, Any]:
    """lm-eval's task or group of each name; a tag, and a group without a score of its own, stand for their tasks.

    Args:
        data_dir: folder with `TASK/SPLIT.jsonl(.gz)`, see docs/evaluation.md; None: the hub.
        seed: of few-shot examples, for tasks that draw them.

    Raises:
        UserError: data that is missing or in another form.
    """
    tasks: dict[str, Any] = {}
    try:
        for name in names:
            if name in PAPER_TASKS:
                tasks[name] = _paper_task(name, data_dir)
            else:
                found = task_manager().load(name)
                group = found["groups"].get(name)
                tasks |= {name: group} if group is not None and group.has_aggregation else found["tasks"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        place = "from the hub; give --data-dir for local data" if data_dir is None else f"from {data_dir}"
        raise UserError(f"cannot load {', '.join(names)} {place}: {type(error).__name__}: {error}") from error
    for task in flat(tasks)["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=seed)
    return tasks


def flat(tasks: dict[str, Any]) -> Any:
    """Tasks and groups in the form that `lm_eval.evaluator.evaluate` takes."""
    return task_manager(paper_only=True).load(list(tasks.values()))


def _paper_task(name: str, data_dir: str | None) -> Any:
    """lm-eval's task with the paper's number of shots; of MMLU, the group of all subjects that the data have."""
    from lm_eval.api.group import AggMetricConfig, Group

    manager, paper = task_manager(paper_only=True), PAPER_TASKS[name]
    members = [member for member in manager.all_subtasks if member.startswith("mmlu_")] if name == "mmlu" else [name]
    changes: dict[str, dict[str, Any]] = {member: {} for member in members}
    if data_dir is not None:
        splits = {split: read_rows(file) for split, file in task_files(data_dir, name).items()}
        changes = {name: _local(splits)}
        if name == "mmlu":
            subjects = sorted({str(row["subject"]) for row in splits["test"]})
            if unknown := [subject for subject in subjects if f"mmlu_{subject}" not in members]:
                raise UserError(f"mmlu: unknown subject {unknown[0]!r}; expected names like 'anatomy'")
            changes = {f"mmlu_{subject}": _local(splits, subject) for subject in subjects}
    # As members of a group, because that is how lm-eval changes fields of its tasks' definitions.
    fields = [{"task": member, "num_fewshot": paper.shots, **change} for member, change in changes.items()]
    loaded = manager.load({"group": "paper", "task": fields})["tasks"]
    if name in loaded:
        return loaded[name]
    group = Group(name, aggregate_metric_list=[AggMetricConfig(paper.metric)])
    for task in loaded.values():
        group.add(task)
    return group


def task_files(data_dir: str | Path, name: str) -> dict[str, Path]:
    """The files that a task needs of a local folder, by split.

    Raises:
        UserError: not a task of the paper, no folder, or not the splits that it needs.
    """
    if name not in PAPER_TASKS:
        raise UserError(
            f"task {name!r} has no local data: --data-dir serves {', '.join(PAPER_NAMES)}; leave --data-dir out to read"
            " others from the hub"
        )
    root = Path(data_dir).expanduser()
    folder = root / name if (root / name).is_dir() else root / "eval" / name
    files = {}
    for split in PAPER_TASKS[name].splits:
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
        for file in task_files(data_dir, name).values()
    }


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file, gzipped if its name says so.

    Raises:
        UserError: a line that is not a JSON object, or no line.
    """
    opener: Any = gzip.open if file.suffix == ".gz" else open
    rows, number = [], 0
    try:
        with opener(file, "rt", encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):  # noqa: B007  # named in the error
                if line.strip():
                    rows.append(dict(json.loads(line)))
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise UserError(f"{file}, line {number}: expected a JSON object ({error})") from error
    if not rows:
        raise UserError(f"{file} is empty")
    return rows


class Rows(list[dict[str, Any]]):
    """A split with what lm-eval asks of a `datasets.Dataset`, without turning every value into Arrow's and back."""

    @property
    def features(self) -> dict[str, Any]:
        """The columns; lm-eval reads their names."""
        return dict.fromkeys(self[0])

    def map(self, function: Callable[[dict[str, Any]], dict[str, Any]]) -> Rows:
        """Rows with the columns that `function` makes of each."""
        return Rows(row | function(row) for row in self)


def _local(splits: dict[str, list[dict[str, Any]]], subject: str | None = None) -> dict[str, Any]:
    """What to change in lm-eval's task so that it reads `splits`, and opens no others."""
    data = {split: Rows(row for row in rows if subject in (None, row.get("subject"))) for split, rows in splits.items()}
    unused = {f"{kind}_split": None for kind in ("training", "validation") if kind not in data}
    return {**unused, "custom_dataset": lambda **_: data}
