"""Running sweeps: what is finished is skipped, what fails is recorded, what runs share is done once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lolcats.errors import UserError
from lolcats.sweep.execution import Execute, Task, execute_run
from lolcats.sweep.queue import Queue
from lolcats.sweep.results import RESULTS_FILE, read_rows, rich_table, summarise, write_row, write_tables
from lolcats.sweep.spec import Run, Sweep
from lolcats.sweep.workers import Worker, Workers

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Plan:
    """A sweep and the folder of its runs.

    Attributes:
        drop_weights: delete each run's weights, and its checkpoints of stage 2, once all is measured,
        keep: but not of the runs of these names.
    """

    sweep: Sweep
    runs: list[Run]
    folder: Path
    drop_weights: bool = False
    keep: frozenset[str] = frozenset()

    def tasks(self) -> list[Task]:
        return [
            Task(self.sweep, run, self.folder, self.drop_weights and run.name not in self.keep) for run in self.runs
        ]


def run_sweep(
    sweep: Sweep, runs: list[Run], folder: Path, *, drop_weights: bool = False, **options: Any
) -> list[dict[str, Any]]:
    """`run_sweeps` of one sweep; returns its table's entries."""
    return run_sweeps([Plan(sweep, runs, folder, drop_weights)], **options)[0]


def run_sweeps(
    plans: list[Plan],
    *,
    workers: int = 1,
    known: list[dict[str, Any]] | None = None,
    deadline: float | None = None,
    console: Console | None = None,
    execute: Execute | None = None,
) -> list[list[dict[str, Any]]]:
    """Run what is not finished yet and write `results.jsonl`, `table.json` and `table.md` into each folder.

    Every run is a folder of its own, an output folder of `linearize`. A run that was killed goes on where it
    was; one that failed before is tried again. Packed data is shared through the data cache; a stage 1 that
    another run has trained with the same settings and seed is taken from it, and so is the whole row of a run
    with the same settings.

    Args:
        workers: runs at the same time, each in a process of its own, on a GPU of its own where there are as
            many. A run waits while another one trains the stage 1 that both have.
        known: rows of other sweeps; a run with the same settings takes its row from there.
        deadline: on `time.monotonic`; no run begins after it, and with several workers those that run are
            stopped then. They go on at the next call.
        execute: runs one run and returns its report; None: `linearize`. With several workers, a function of
            a module.

    Returns:
        Each sweep's table entries; see `summarise`.

    Raises:
        UserError: a folder holds runs of the same names with other settings. A run's own failure is recorded
            instead.
    """
    console = console or Console(stderr=True)
    tasks = [task for plan in plans for task in plan.tasks()]
    rows = {plan.folder: {row["run"]: row for row in read_rows(plan.folder / RESULTS_FILE)} for plan in plans}
    for plan in plans:
        _check_settings(plan, rows[plan.folder])
    old = [row for found in rows.values() for row in found.values()]
    queue = Queue(tasks, finished=[*old, *(known or [])])
    total = len(tasks)

    def record(task: Task, row: dict[str, Any], how: str) -> None:
        rows[task.folder][task.run.name] = row
        write_row(task.folder, row)
        queue.ended(row)
        result = row["status"] if row["status"] == "finished" else f"failed: {row['error']}"
        console.print(
            f"{how}{task.run.name}: {result}; {total - len(queue.waiting)} of {total} begun",
            highlight=False,
            markup=False,
        )

    for task in list(queue.waiting):
        if rows[task.folder].get(task.run.name, {}).get("status") == "finished":
            queue.waiting.remove(task)
            console.print(f"{task.run.name}: finished before")
    if workers > 1:
        _side_by_side(queue, plans[0].folder, workers, deadline, execute, record, console)
    else:
        _one_by_one(queue, deadline, execute, record, console)
    return [_conclude(plan, rows[plan.folder], console) for plan in plans]


def _one_by_one(queue: Queue, deadline: float | None, execute: Execute | None, record: Any, console: Console) -> None:
    while not _late(deadline) and (step := queue.take([])) is not None:
        if step.row is not None:
            record(step.task, step.row, f"as {step.row['row_of']}, ")
            continue
        console.rule(step.task.run.name)
        record(step.task, execute_run(step.task, step.donor, console, execute), "")


def _side_by_side(
    queue: Queue,
    logs: Path,
    count: int,
    deadline: float | None,
    execute: Execute | None,
    record: Any,
    console: Console,
) -> None:
    with Workers(logs, count, execute) as workers, _status(workers.members, console):
        while (queue.waiting or workers.busy()) and not _late(deadline):
            for worker in workers.idle():
                while (step := queue.take(workers.busy())) is not None and step.row is not None:
                    record(step.task, step.row, f"as {step.row['row_of']}, ")
                if step is not None:
                    workers.begin(worker, step.task, step.donor)
                    console.print(f"{_name(worker)} begins {step.task.run.name}", highlight=False)
            for worker, task, row in workers.rows(POLL_SECONDS):
                record(task, row, f"{_name(worker)}, ")


def _late(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


@contextmanager
def _status(members: list[Worker], console: Console) -> Iterator[None]:
    """On a terminal: a line for each worker below everything else."""

    def lines() -> Text:
        busy = [(worker, worker.task) for worker in members if worker.task is not None]
        text = "\n".join(f"{_name(worker)}: {task.run.name}  {worker.status}" for worker, task in busy)
        return Text(text, no_wrap=True, overflow="ellipsis")

    if not console.is_terminal:
        yield
        return
    with Live(get_renderable=lines, console=console, refresh_per_second=2, transient=True):
        yield


def _name(worker: Worker) -> str:
    return f"worker {worker.number}" if worker.gpu is None else f"worker {worker.number} on GPU {worker.gpu}"


def _conclude(plan: Plan, rows: dict[str, dict[str, Any]], console: Console) -> list[dict[str, Any]]:
    """Write and print a sweep's table, and say what is missing in it."""
    order: list[dict[str, str]] = []
    for run in plan.runs:
        if run.case not in order:
            order.append(run.case)
    mine = [rows[run.name] for run in plan.runs if run.name in rows]
    entries = summarise(mine, plan.folder, order)
    write_tables(plan.folder, entries)
    console.print(rich_table(entries, f"{plan.folder}: mean ± standard deviation over seeds"))
    failed = [row["run"] for row in mine if row["status"] == "failed"]
    if failed:
        console.print(f"failed: {', '.join(failed)}; see error.txt in their folders. The same command tries them again")
    left = [run.name for run in plan.runs if run.name not in rows]
    if left:
        console.print(f"not finished within the time limit: {', '.join(left)}; the same command goes on")
    return entries


def _check_settings(plan: Plan, rows: dict[str, dict[str, Any]]) -> None:
    for run in plan.runs:
        row = rows.get(run.name)
        if row is not None and row["status"] == "finished" and row["key"] != run.key:
            raise UserError(
                f"{plan.folder} holds a finished run {run.name} with other settings; choose another --output for the"
                f" changed sweep, or move {plan.folder / run.name} away and delete its line in results.jsonl"
            )
