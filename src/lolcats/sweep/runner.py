"""A sweep's commands, some at a time, and the table of what they measured."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from rich.console import Console

from lolcats.analysis.files import write_text
from lolcats.errors import UserError
from lolcats.report import STEPS, read_report
from lolcats.sweep.spec import EVALUATION_FILE, Sweep, SweepRun, commands, held_out_file

RESULTS_FILE = "results.jsonl"
TABLE_FILE = "table.md"
COMMANDS_FILE = "commands.sh"  # in a run's folder, once they are done
_STAGE_NUMBERS = ("steps", "tokens", "seconds", "peak_memory_gib", "best_step", "layer_losses_before", "layer_losses")

Execute = Callable[[list[str], Path, dict[str, str]], int]
"""Runs the words of a command, its output appended to a log file, with environment variables; the exit status."""


class Worker:
    """A process that runs commands one after another (`lolcats.cli.worker`); a new one if the last has ended."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, words: list[str], log: Path) -> int:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lolcats.cli.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | self.environment,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([words, str(log)]) + "\n")
        self.process.stdin.flush()
        if answer := self.process.stdout.readline():
            return int(answer)
        return self.process.wait()  # killed, for want of memory say

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.communicate()


def planned(sweep: Sweep, runs: list[SweepRun], folder: Path) -> dict[str, list[list[str]]]:
    """Run -> commands, in an order in which each can be run after those before it.

    The first run with a stage 1 trains it; others with the same one take it from there.
    """
    first: dict[str, str] = {}
    sources: dict[str, str] = {}
    for run in runs:
        if run.stage_1 is not None and first.setdefault(run.stage_1, run.name) != run.name:
            sources[run.name] = first[run.stage_1]
    ordered = sorted(runs, key=lambda run: run.name in sources)
    return {run.name: commands(sweep, run, folder, sources.get(run.name)) for run in ordered}


def run_sweep(
    sweep: Sweep,
    runs: list[SweepRun],
    folder: Path,
    *,
    workers: int = 1,
    drop_weights: bool = False,
    console: Console | None = None,
    execute: Execute | None = None,
) -> list[dict[str, Any]]:
    """Run what is not finished yet; write `results.jsonl`, a row a run, and `table.md` into the folder.

    A run is a folder with a log; it is finished when all its commands are. One that was interrupted resumes, one that
    failed is tried again.

    Args:
        workers: runs at the same time, on a GPU of its own each where there are as many.
        drop_weights: delete a run's weights when all is measured.
        execute: default: a process of this Python for each worker.

    Returns:
        The rows, in the runs' order.

    Raises:
        UserError: the folder holds a finished run of the same name with other commands.
    """
    console = console or Console(stderr=True)
    work = planned(sweep, runs, folder)
    done = {name for name, words in work.items() if _finished(folder / name, words)}
    free: Queue[Worker] = Queue()
    gpus = visible_gpus()
    for number in range(workers):
        environment = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {}
        if workers > 1:
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // workers))
        free.put(Worker(environment))
    begun: dict[str, Future[str | None]] = {}

    def run_one(name: str) -> str | None:
        """None, or what failed."""
        linearize = work[name][0]
        if linearize[-2] == "--transfer-from" and (source := Path(linearize[-1]).name) in begun:
            begun[source].result()  # it began before this one
        worker = free.get()
        log = folder / f"{name}.log"
        console.print(f"{name} begins", highlight=False)
        try:
            for words in work[name]:
                if status := worker(words, log) if execute is None else execute(words, log, worker.environment):
                    return f"`{shlex.join(words[:2])}` ended with status {status}; see {log}"
        finally:
            free.put(worker)
        write_text(folder / name / COMMANDS_FILE, _script(work[name]))
        if drop_weights:
            for file in (folder / name).glob("model*.safetensors"):
                file.unlink()
        return None

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(workers) as pool:
        for name in work:
            if name not in done:
                begun[name] = pool.submit(run_one, name)
        try:
            errors = {name: future.result() for name, future in begun.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    while not free.empty():
        free.get().close()
    rows = [_row(sweep, run, folder / run.name, errors.get(run.name)) for run in runs]
    write_text(folder / RESULTS_FILE, "".join(json.dumps(row) + "\n" for row in rows))
    head, cells = table_cells(rows)
    lines = [head, ["---"] * len(head), *cells]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    write_text(folder / TABLE_FILE, table)
    console.print(
        f"{folder / TABLE_FILE}: mean ± standard deviation over seeds\n\n{table}", highlight=False, markup=False
    )
    for row in rows:
        if row["status"] == "failed":
            console.print(f"[red]failed[/]: {row['run']}: {row['error']}", highlight=False)
    return rows


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """All numbers of a run that a table shows, by column; none of a failed one."""
    if row["status"] == "failed":
        return {}
    found = {f"perplexity {step}": row["perplexity"].get(step) for step in STEPS}
    found |= {f"perplexity on {name}": value for name, value in row["held_out"].items()}
    found |= {f"MiB at {cache['tokens']} tokens": cache["bytes"] / 2**20 for cache in [row.get("cache")] if cache}
    measured = row["evaluation"]
    found |= {f"passkey {entry['length']}": entry["accuracy"] for entry in measured.get("passkey", [])}
    found |= {f"{entry['kind']} {entry['length']}": entry["accuracy"] for entry in measured.get("recall", [])}
    for name, cell in (measured.get("tasks", {}) | measured.get("averages", {})).items():
        found[name] = cell["value"] if isinstance(cell, dict) else cell
    return {name: value for name, value in found.items() if value is not None}


def table_cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and lines of a table: a line a case, mean and sample standard deviation over its seeds."""
    cases: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for row in rows:
        cases.setdefault(tuple(row["case"].values()), []).append(numbers_of(row))
    columns = list(dict.fromkeys(name for found in cases.values() for numbers in found for name in numbers))
    lines = []
    for case, found in cases.items():
        finished = [numbers for numbers in found if numbers]
        failed = len(found) - len(finished)
        means = [_mean([numbers[column] for numbers in finished if column in numbers]) for column in columns]
        lines.append([*case, str(len(finished)) + (f" ({failed} failed)" if failed else ""), *means])
    return [*rows[0]["case"], "seeds", *columns], lines


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, for CUDA_VISIBLE_DEVICES."""
    import torch

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(number) for number in range(torch.cuda.device_count())]


def _finished(output: Path, words: list[list[str]]) -> bool:
    try:
        done = (output / COMMANDS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    if done != _script(words):
        raise UserError(
            f"{output} is a finished run with other settings ({COMMANDS_FILE} has them); choose another --output, or"
            " move it away"
        )
    return True


def _script(words: list[list[str]]) -> str:
    return "".join(shlex.join(command) + "\n" for command in words)


def _row(sweep: Sweep, run: SweepRun, output: Path, error: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {"run": run.name, "case": run.case, "seed": run.seed}
    if error is not None:
        return row | {"status": "failed", "error": error}
    report = read_report(output)
    assert report is not None  # of a run whose commands succeeded
    stages = {
        name: {key: stage[key] for key in _STAGE_NUMBERS if key in stage}
        | {"curve": [[entry["step"], entry["perplexity"]] for entry in stage.get("curve", []) if "perplexity" in entry]}
        for name, stage in report["stages"].items()
    }
    evaluation = {} if sweep.evaluate is None else _read(output / EVALUATION_FILE)["models"][-1]
    return row | {
        "status": "finished",
        "perplexity": report["perplexity"],
        "cache": report.get("cache"),
        "held_out": {name: _read(held_out_file(output, name))[0]["perplexity"] for name in sweep.held_out},
        "evaluation": {key: evaluation[key] for key in ("tasks", "averages", "passkey", "recall") if key in evaluation},
        "stages": stages,
        "provenance": report.get("provenance"),
    }


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _mean(values: list[float]) -> str:
    if not values:
        return ""
    spread = f"\u00a0±\u00a0{statistics.stdev(values):.3f}" if len(values) > 1 else ""  # no line breaks there
    return f"{statistics.fmean(values):.3f}{spread}"
