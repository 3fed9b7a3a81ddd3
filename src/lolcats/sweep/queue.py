"""What runs next: nothing twice, and no stage 1 twice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lolcats.evaluation.suite import expand_tasks
from lolcats.sweep.execution import Task, has_transfer


@dataclass(frozen=True)
class Step:
    """What to do with a task.

    Attributes:
        row: it need not run: this is its row.
        donor: folder of the run whose stage 1 it takes; None: it trains its own, or has begun before.
    """

    task: Task
    row: dict[str, Any] | None = None
    donor: Path | None = None


class Queue:
    """Tasks in their order, those left out that wait for what a busy one is doing.

    Args:
        finished: rows of runs that need not run again.
    """

    def __init__(self, tasks: list[Task], finished: list[dict[str, Any]]) -> None:
        self.tasks = tasks
        self.waiting = list(tasks)
        self.finished: dict[str, dict[str, Any]] = {}
        for row in finished:
            self.ended(row)

    def ended(self, row: dict[str, Any]) -> None:
        """A row is known; others with the same settings can take it."""
        if row["status"] == "finished":
            self.finished.setdefault(row["key"], row)

    def take(self, busy: list[Task]) -> Step | None:
        """The first task that need not wait, removed from `waiting`; None if all have to.

        A task waits while a busy one has the same settings, or trains the stage 1 that it needs.
        """
        running = {task.run.key for task in busy}
        training = {task.run.transfer_key for task in busy if not self._trained(task)} - {None}
        for task in self.waiting:
            row = self.finished.get(task.run.key)
            if row is not None and covers(row, task):
                self.waiting.remove(task)
                own = {"run": task.run.name, "case": task.run.case, "seed": task.run.seed, "row_of": row["run"]}
                return Step(task, row=row | own)
            if task.run.key in running or task.run.transfer_key in training:
                continue
            self.waiting.remove(task)
            begun = (task.output / "run").exists()
            return Step(task, donor=None if begun else next(iter(self._trained(task)), None))
        return None

    def _trained(self, task: Task) -> list[Path]:
        """Folders of runs that have ended the stage 1 of this task."""
        if task.run.transfer_key is None:
            return []
        same = (other.output for other in self.tasks if other.run.transfer_key == task.run.transfer_key)
        return [output for output in same if has_transfer(output)]


def covers(row: dict[str, Any], task: Task) -> bool:
    """Whether a row of the same settings holds all that this task's sweep measures."""
    sweep = task.sweep
    if sweep.held_out and row.get("held_out_how") != sweep.held_out_how():
        return False
    if sweep.evaluate is None:
        return True
    if row.get("evaluate", {}) != sweep.evaluate.how():
        return False
    measured = row.get("evaluation", {})
    return set(expand_tasks(sweep.evaluate.tasks)) <= {*measured.get("tasks", {}), *measured}
