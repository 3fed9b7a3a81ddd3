"""The paper's tasks as lm-eval defines them, on data from the hub or from a local folder.

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

    name: str
    """lm-eval's task or group."""
    title: str
    metric: str
    shots: int
    split: str
    """The split that is measured."""


PAPER_TASKS = (
    PaperTask("piqa", "PIQA", "acc", 0, "validation"),
    PaperTask("arc_easy", "ARC-e", "acc", 0, "test"),
    PaperTask("arc_challenge", "ARC-c (norm)", "acc_norm", 0, "test"),
    PaperTask("hellaswag", "HellaSwag (norm)", "acc_norm", 0, "validation"),
    PaperTask("winogrande", "WinoGrande", "acc", 0, "validation"),
    PaperTask("mmlu", "MMLU (5-shot)", "acc", 5, "test"),
)
PAPER_NAMES = tuple(task.name for task in PAPER_TASKS)


def paper_task(name: str) -> PaperTask | None:
    return next((task for task in PAPER_TASKS if task.name == name), None)


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


def _manager_for(names: list[str]) -> Any:
    return task_manager(paper_only=set(names) <= set(PAPER_NAMES))


def check_names(names: list[str], data_dir: str | None) -> None:
    """Refuse unknown tasks, and tasks that a local folder does not hold.

    Raises:
        UserError: as said, or lm-eval is missing.
    """
    if data_dir is not None:
        for name in names:
            if paper_task(name) is None:
                raise UserError(
                    f"task {name!r} has no local data: --data-dir serves {', '.join(PAPER_NAMES)}; leave --data-dir"
                    " out to read others from the hub"
                )
            task_files(data_dir, name)
    known = set(_manager_for(names).task_index)
    for name in names:
        if name not in known:
            raise UserError(f"no task {name!r} in lm-eval; the paper's are {', '.join(PAPER_NAMES)}")


def load_tasks(names: list[str], data_dir: str | None, seed: int) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Tasks for `lm_eval.evaluator.evaluate`, and for each name the lm-eval tasks it consists of.

    Args:
        data_dir: folder with `TASK/SPLIT.jsonl(.gz)`, see docs/evaluation.md; None: the hub.
        seed: of few-shot examples, for tasks that draw them.

    Raises:
        UserError: data that is missing or in another form.
    """
    manager = _manager_for(names)
    specs: list[Any] = []
    parts: dict[str, list[str]] = {}
    for name in names:
        task = paper_task(name)
        members = _mmlu_members(manager) if name == "mmlu" else {name: None}
        splits = None if data_dir is None else read_splits(data_dir, name)
        if splits is not None and name == "mmlu":
            members = _present(members, splits)
        parts[name] = list(members)
        for member, subject in members.items():
            if task is None:
                specs.append(name)
                continue
            changes: dict[str, Any] = {"num_fewshot": task.shots}
            if splits is not None:
                changes |= _local(splits, subject)
            specs.append((member, changes))
    try:
        loaded = manager.load([spec if isinstance(spec, str) else _build(manager, *spec) for spec in specs])
    except (OSError, ValueError, KeyError, IndexError) as error:
        place = "from the hub; give --data-dir for local data" if data_dir is None else f"from {data_dir}"
        raise UserError(f"cannot load {', '.join(names)} {place}: {type(error).__name__}: {error}") from error
    for built in loaded["tasks"].values():
        if built.get_config("num_fewshot") is None:
            built.set_config(key="num_fewshot", value=0)
        built.set_fewshot_seed(seed=seed)
    for name in names:  # a group that is not the paper's
        if name in loaded["groups"]:
            parts[name] = [name]
    return loaded, parts


def task_files(data_dir: str | Path, name: str) -> dict[str, Path]:
    """The files that a task needs of a local folder, by split.

    Raises:
        UserError: no folder, or not the split that is measured.
    """
    root = Path(data_dir).expanduser()
    folder = next((place for place in (root / name, root / "eval" / name) if place.is_dir()), None)
    task = paper_task(name)
    wanted = [task.split if task is not None else "test"] + (["dev"] if name == "mmlu" else [])
    if folder is None:
        raise UserError(
            f"--data-dir {data_dir}: no folder {name}/ in it; expected {name}/{wanted[0]}.jsonl or .jsonl.gz"
        )
    files = {}
    for split in wanted:
        for suffix in (".jsonl", ".jsonl.gz"):
            if (folder / f"{split}{suffix}").is_file():
                files[split] = folder / f"{split}{suffix}"
    for split in wanted:
        if split not in files:
            raise UserError(f"{folder} has no {split}.jsonl or {split}.jsonl.gz")
    return files


def data_hashes(data_dir: str | Path, names: list[str]) -> dict[str, str]:
    """sha256 of the files that tasks are measured on."""
    return {
        f"{name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest()
        for name in names
        for file in task_files(data_dir, name).values()
    }


def read_splits(data_dir: str | Path, name: str) -> dict[str, list[dict[str, Any]]]:
    """The rows that a task needs: those that are measured, and the examples before them."""
    return {split: read_rows(file) for split, file in task_files(data_dir, name).items()}


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file, gzipped if its name says so.

    Raises:
        UserError: a line that is not a JSON object, or no line.
    """
    opener: Any = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8") as stream:
            lines = stream.read().split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise UserError(f"{file}, line {number}: not valid JSON ({error.msg})") from error
            if not isinstance(rows[-1], dict):
                raise UserError(f"{file}, line {number}: expected a JSON object, got {type(rows[-1]).__name__}")
    if not rows:
        raise UserError(f"{file} is empty")
    return rows


def _build(manager: Any, name: str, changes: dict[str, Any]) -> Any:
    """lm-eval's task `name` with some fields of its definition changed."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml  # lm-eval is pinned, and has no public way to do this

    definition = load_yaml(manager.task_index[name].yaml_path, resolve_func=True)
    kept = {key: value for key, value in definition.items() if key not in ("tag", "group")}
    if "process_docs" in kept:
        kept["process_docs"] = functools.cache(kept["process_docs"])  # asked for again and again
    return ConfigurableTask(config=kept | changes)


def _mmlu_members(manager: Any) -> dict[str, Any]:
    """lm-eval's MMLU tasks, and the subject of each, which is part of its name."""
    members = {}
    for name, entry in manager.task_index.items():
        path = entry.yaml_path
        # Beside the tasks, the folder holds groups, whose files begin with an underscore.
        if path is not None and path.parent.parts[-2:] == ("mmlu", "default") and path.stem == name:
            members[name] = name.removeprefix("mmlu_")
    return dict(sorted(members.items()))


def _present(members: dict[str, Any], splits: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The members whose subjects the local test split holds."""
    found = {row.get("subject") for row in splits["test"]}
    unknown = found - set(members.values())
    if unknown:
        raise UserError(f"mmlu: unknown subject {sorted(map(str, unknown))[0]!r}; expected names like 'anatomy'")
    return {member: subject for member, subject in members.items() if subject in found}


class Rows(list[dict[str, Any]]):
    """A split with what lm-eval asks of a `datasets.Dataset`, without turning every value into Arrow's and back."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # by identity: what is made of a split is cached

    @property
    def features(self) -> dict[str, Any]:
        """The columns; lm-eval reads their names."""
        return dict.fromkeys(self[0])

    def map(self, function: Callable[[dict[str, Any]], dict[str, Any]]) -> Rows:
        """Rows with the columns that `function` makes of each."""
        return Rows(row | function(row) for row in self)


def _local(splits: dict[str, list[dict[str, Any]]], subject: str | None) -> dict[str, Any]:
    """What to change in lm-eval's task so that it reads `splits`."""
    data: dict[str, Rows] = {}
    for split, rows in splits.items():
        chosen = [row for row in rows if subject is None or row.get("subject") == subject]
        if chosen:  # every row has the columns of the first
            data[split] = Rows({column: row.get(column) for column in chosen[0]} for row in chosen)
    # Splits that lm-eval would open but that are not here; the six tasks take no examples from them.
    changes: dict[str, Any] = {
        f"{kind}_split": None
        for kind, split in (("training", "train"), ("validation", "validation"))
        if split not in data
    }
    return changes | {"custom_dataset": lambda **_: data}
