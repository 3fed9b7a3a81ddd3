"""Runs side by side: order, processes that fail or die, limits of time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from lolcats.sweep import workers as module
from lolcats.sweep.execution import Task
from lolcats.sweep.results import RESULTS_FILE, read_rows
from lolcats.sweep.runner import run_sweep
from lolcats.sweep.spec import read_sweep
from lolcats.sweep.workers import Workers, visible_gpus

QUIET = Console(quiet=True)


def test_two_workers_train_a_shared_stage_1_once(sweep_file, tmp_path, capsys):
    sweep, runs = read_sweep(sweep_file, seeds=[0])
    _, broken = read_sweep(sweep_file, seeds=[7], overrides=["data.sequence_length=4096", "adjust.lora_rank=2"])
    folder = tmp_path / "out"
    entries = run_sweep(sweep, [*runs, broken[0]], folder, workers=2, console=Console())
    rows = {row["run"]: row for row in read_rows(folder / RESULTS_FILE)}
    first, second = (rows[run.name] for run in runs)
    assert (first["status"], second["status"]) == ("finished", "finished")
    assert (first["transfer_from"], second["transfer_from"]) == (None, runs[0].name)
    assert second["perplexity"]["transfer"] == first["perplexity"]["transfer"]
    assert second["held_out"]["own"] > 1
    assert [step for step, _ in second["stages"]["adjust"]["curve"]] == [0, 2]

    bad = rows[broken[0].name]
    assert bad["status"] == "failed"
    assert "128 positions" in bad["error"]
    assert "Traceback" in (folder / bad["run"] / "error.txt").read_text()
    assert entries[0]["failed"] == [{"seed": 7, "error": bad["error"]}]
    printed = capsys.readouterr().out
    assert f"worker 1 begins {runs[0].name}" in printed
    assert f"{runs[1].name}: finished" in printed
    logs = "".join(file.read_text() for file in folder.glob("worker-*.log"))
    assert "validation perplexity, teacher" in logs

    # the next call runs nothing that is finished; with the rows alone, another folder needs no run at all
    run_sweep(sweep, runs, folder, workers=2, console=QUIET)
    assert len(read_rows(folder / RESULTS_FILE)) == 3
    again = tmp_path / "again"
    run_sweep(sweep, runs, again, workers=2, known=list(rows.values()), console=QUIET)
    copied = read_rows(again / RESULTS_FILE)
    assert [(row["run"], row["row_of"]) for row in copied] == [(run.name, run.name) for run in runs]
    assert not (again / runs[0].name).exists()


def test_a_process_that_dies_is_a_failed_run(sweep_file, tmp_path):
    sweep, runs = read_sweep(sweep_file, seeds=[0])
    tasks = [Task(sweep, run, tmp_path / "out") for run in runs]
    with Workers(tmp_path / "out", 2) as workers:
        first, second = workers.members
        for worker, task in zip(workers.members, tasks, strict=True):
            workers.begin(worker, task, None)
        assert workers.busy() == tasks
        first.process.kill()
        ((worker, task, row),) = workers.rows(60)
        assert (worker, task, row["status"], row["run"]) == (first, tasks[0], "failed", runs[0].name)
        assert "exit code -9" in row["error"]
        assert "worker-1.log" in (tmp_path / "out" / runs[0].name / "error.txt").read_text()
        assert workers.idle() == [first]
        process = second.process
        assert process.is_alive()
    assert not process.is_alive()


def test_ctrl_c_ends_all_and_the_next_call_goes_on(sweep_file, tmp_path):
    sweep, runs = read_sweep(sweep_file, overrides=["adjust.lora_rank=2"], seeds=[0, 1])
    folder = tmp_path / "out"

    def interrupt():
        logs = [folder / f"worker-{number}.log" for number in (1, 2)]
        until = time.monotonic() + 120
        # One has begun; the other may still be starting, which can take as long as a run.
        while time.monotonic() < until and not any(log.is_file() and log.stat().st_size for log in logs):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_sweep(sweep, runs[:2], folder, workers=2, console=QUIET)
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()
    assert multiprocessing.active_children() == []
    assert not read_rows(folder / RESULTS_FILE)
    run_sweep(sweep, runs[:2], folder, console=QUIET)
    assert {row["status"] for row in read_rows(folder / RESULTS_FILE)} == {"finished"}


def test_no_run_begins_after_the_deadline(sweep_file, tmp_path, capsys):
    sweep, runs = read_sweep(sweep_file, seeds=[0])
    for count in (1, 2):
        run_sweep(sweep, runs, tmp_path, workers=count, deadline=time.monotonic(), console=Console())
        assert read_rows(tmp_path / RESULTS_FILE) == []
        assert "not finished within the time limit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "count", "expected"), [(None, 2, ["0", "1"]), ("3,5", 2, ["3", "5"]), ("", 0, [])]
)
def test_gpus_are_those_that_may_be_used(monkeypatch, variable, count, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == expected


def test_every_worker_has_its_gpu(sweep_file, tmp_path, monkeypatch):
    """Processes that only write down which GPUs they may use."""
    seen = {}

    class Recorder:
        def __init__(self, target, args):
            self.name = args[1].name

        def start(self):
            seen[self.name] = module.os.environ.get("CUDA_VISIBLE_DEVICES")

        def join(self, timeout=None):
            pass

        def terminate(self):
            pass

        def is_alive(self):
            return False

    pipe = SimpleNamespace(send=lambda _: None, close=lambda: None)
    context = SimpleNamespace(Pipe=lambda: (pipe, pipe), Process=lambda target, args: Recorder(target, args))
    monkeypatch.setattr(module, "get_context", lambda _: context)
    monkeypatch.setattr(module, "visible_gpus", lambda: ["4", "7"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sweep, runs = read_sweep(sweep_file, seeds=[0])
    with Workers(tmp_path, 3) as workers:
        for worker in workers.members:
            workers.begin(worker, Task(sweep, runs[0], tmp_path), None)
    assert seen == {"worker-1.log": "4", "worker-2.log": "7", "worker-3.log": "4"}
    assert "CUDA_VISIBLE_DEVICES" not in module.os.environ
