"""Processes that run the runs of a sweep side by side, one per GPU.

Every process works through runs one after another and tells its parent what it is doing; only the parent writes
results. What libraries print goes to `worker-<n>.log` in the sweep's folder.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lolcats.sweep.execution import Execute, Task, execute_run, failure

STOP_SECONDS = 5.0  # between asking a process to end and ending it


@dataclass
class Worker:
    """One process and what it is doing.

    Attributes:
        gpu: value of CUDA_VISIBLE_DEVICES for it; None: as it is.
        task: None while it waits for work.
        status: the last line of the run's progress.
    """

    number: int
    gpu: str | None
    process: Any = None
    connection: Any = None
    task: Task | None = None
    status: str = ""


@dataclass
class Workers:
    """A fixed number of processes, started when first needed. A context manager that leaves none behind.

    Attributes:
        logs: folder for what the processes print.
        execute: see `execute_run`.
    """

    logs: Path
    count: int
    execute: Execute | None = None
    members: list[Worker] = field(default_factory=list)

    def __enter__(self) -> Workers:
        gpus = visible_gpus()
        self.members = [
            Worker(number, gpus[(number - 1) % len(gpus)] if gpus else None) for number in range(1, self.count + 1)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.members:
            if worker.process is not None:
                worker.process.terminate()
        for worker in self.members:
            self._close(worker)

    def idle(self) -> list[Worker]:
        return [worker for worker in self.members if worker.task is None]

    def busy(self) -> list[Task]:
        return [worker.task for worker in self.members if worker.task is not None]

    def begin(self, worker: Worker, task: Task, donor: Path | None) -> None:
        """Give an idle worker a run; see `execute_run` for `donor`."""
        if worker.process is None:
            self._start(worker)
        worker.task, worker.status = task, "starting"
        worker.connection.send((task, donor))

    def rows(self, seconds: float) -> Iterator[tuple[Worker, Task, dict[str, Any]]]:
        """Runs that have ended and their rows, waiting at most so long for the first news of any worker.

        A process that died leaves a failed row, and is started again for its next run.
        """
        waiting = {worker.connection: worker for worker in self.members if worker.task is not None}
        for connection in wait(list(waiting), seconds):
            worker = waiting[connection]
            try:
                while worker.task is not None and worker.connection.poll():
                    news = worker.connection.recv()
                    if isinstance(news, str):
                        worker.status = news
                        continue
                    task, worker.task, worker.status = worker.task, None, ""
                    if news["status"] == "failed":  # an error on a GPU may have spoiled the process for what follows
                        self._close(worker)
                    yield worker, task, news
            except (EOFError, OSError):
                assert worker.task is not None
                task, worker.task, worker.status = worker.task, None, ""
                yield worker, task, self._died(worker, task)

    def _start(self, worker: Worker) -> None:
        context = get_context("spawn")
        worker.connection, theirs = context.Pipe()
        threads = max(1, (os.cpu_count() or 1) // self.count)
        worker.process = context.Process(target=_serve, args=(theirs, self._log(worker), threads, self.execute))
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        try:
            if worker.gpu is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = worker.gpu  # the new process inherits it
            worker.process.start()
        finally:
            if worker.gpu is not None:
                _restore("CUDA_VISIBLE_DEVICES", before)
        theirs.close()

    def _died(self, worker: Worker, task: Task) -> dict[str, Any]:
        worker.process.join(STOP_SECONDS)
        error = f"its process ended with exit code {worker.process.exitcode}"
        self._close(worker)
        return failure(task.run, task.output, error, f"{error}; the end of {self._log(worker)} says more\n")

    def _log(self, worker: Worker) -> Path:
        return self.logs / f"worker-{worker.number}.log"

    def _close(self, worker: Worker) -> None:
        if worker.process is None:
            return
        worker.connection.close()  # a process that waits for work ends at this
        worker.process.join(STOP_SECONDS)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.process = worker.connection = None


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, for CUDA_VISIBLE_DEVICES."""
    if not torch.cuda.is_available():
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(number) for number in range(torch.cuda.device_count())]


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


class _Reporter:
    """A text stream for a console: everything goes to the log, the last line to the parent."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def write(self, text: str) -> int:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if lines:
            self.connection.send(lines[-1])
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def _serve(connection: Connection, log_file: Path, threads: int, execute: Execute | None) -> None:
    """The life of a process: runs from the connection until it is closed, or until one fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends all
    torch.set_num_threads(threads)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    console = Console(file=_Reporter(connection), width=150)  # type: ignore[arg-type]  # all that a console calls
    with suppress(EOFError, BrokenPipeError):
        while True:
            task, donor = connection.recv()
            console.rule(task.run.name)
            row = execute_run(task, donor, console, execute)
            connection.send(row)
            if row["status"] == "failed":
                return
