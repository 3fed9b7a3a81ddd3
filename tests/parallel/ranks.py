"""Starts the processes of a run on this machine, as torchrun would; collects and compares what they make."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lolcats

WORKER = Path(__file__).parent / "worker.py"
TIMEOUT_S = 240


@dataclass
class Ended:
    """A process that has ended: exit status, standard error and what worker.py returned."""

    status: int
    errors: str
    result: Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**variables: str) -> dict[str, str]:
    source = str(Path(lolcats.__file__).parents[1])
    # torchrun lies beside this Python, whose environment need not be active.
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": programs, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", **variables}


def run_ranks(runs: dict[str, dict[str, Any]], folder: Path, world: int = 2) -> list[Ended]:
    """Let `world` processes do the runs of worker.py; nothing outlives the call."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "arguments.json"
    file.write_text(json.dumps(runs))
    port = str(free_port())
    processes = []
    for rank in range(world):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": port}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(WORKER), str(file), str(folder / f"result-{rank}.json")],
                env=environment(MASTER_ADDR="127.0.0.1", **variables),
                stdout=subprocess.DEVNULL,
                stderr=(folder / f"stderr-{rank}.txt").open("w"),
            )
        )
    try:
        statuses = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    ended = []
    for rank, status in enumerate(statuses):
        result = folder / f"result-{rank}.json"
        text = (folder / f"stderr-{rank}.txt").read_text()
        ended.append(Ended(status, text, json.loads(result.read_text()) if result.exists() else None))
    return ended


def largest_difference(first, second):
    """Largest over the tensors of the largest difference, relative to the tensor's largest value."""
    assert first.keys() == second.keys()
    return max(
        float((first[name].double() - second[name].double()).abs().max() / second[name].double().abs().max())
        for name in first
    )
