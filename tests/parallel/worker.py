"""What the processes of a test do; started by ranks.py: worker.py SCENARIO ARGUMENTS.json RESULT.json"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lolcats.config import LinearizeConfig, merge
from lolcats.errors import UserError
from lolcats.parallel.group import Group
from lolcats.parallel.launch import open_group
from lolcats.pipeline import linearize
from lolcats.training import folder
from lolcats.training.transfer import TransferStage

QUIET = Console(quiet=True)


def run(settings: dict[str, Any], output: str, resume: bool = False) -> dict[str, Any] | str:
    """The report, or the error's message."""
    try:
        return linearize(LinearizeConfig.from_dict(settings), Path(output), resume=resume, console=QUIET)
    except UserError as error:
        return str(error)


def several(arguments: dict[str, Any]) -> dict[str, Any]:
    """One linearization after another in the same processes; some with something broken on rank 1."""
    results: dict[str, Any] = {}
    with open_group("cpu", 60) as group:
        results["main first"] = _main_fails_first(group)
        for name, item in arguments["runs"].items():
            undo = BREAK[item.get("broken", "nothing")](group)
            results[name] = run(
                merge(arguments["settings"], item["changes"]), item["output"], item.get("resume", False)
            )
            undo()
            group.barrier()
    return results


def _main_fails_first(group: Group) -> dict[str, Any]:
    """Which ranks ran a `main_first` block that rank 0 fails in, and what each of them raised."""
    ran = False
    try:
        with group.main_first():
            ran = True
            if group.is_main:
                raise UserError("no room")
    except UserError as error:
        with group.main_first():  # the group is still usable
            return {"ran": ran, "error": str(error)}
    return {"ran": ran, "error": None}


def killed(arguments: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 is killed in the middle of its n-th micro-step."""
    steps, left = TransferStage.micro_step, arguments["steps"]

    def counted(self: TransferStage, *args: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return steps(self, *args)

    TransferStage.micro_step = counted
    return {"run": run(arguments["settings"], arguments["output"])}


def _nothing(group: Group) -> Any:
    return lambda: None


def _nan(group: Group) -> Any:
    """Rank 1 gets weights that are not finite in its third micro-step."""
    original, calls = TransferStage.micro_step, [0]

    def poisoned(self: TransferStage, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3 and group.rank == 1:
            with torch.no_grad():
                self.layers[1].q_weight.fill_(torch.nan)
        return original(self, *args)

    TransferStage.micro_step = poisoned

    def undo() -> None:
        TransferStage.micro_step = original

    return undo


def _full_disk(group: Group) -> Any:
    """Rank 1 can write no file of more than 100 bytes once the first checkpoint is written."""
    original, calls = folder.write_checkpoint, [0]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limited(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4 and group.rank == 1:  # the second one of stage 1, after its best weights
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            return original(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    folder.write_checkpoint = limited

    def undo() -> None:
        folder.write_checkpoint = original

    return undo


BREAK = {"nothing": _nothing, "nan": _nan, "full disk": _full_disk}

if __name__ == "__main__":
    torch.set_num_threads(1)
    scenario, arguments, result = sys.argv[1:]
    found = globals()[scenario](json.loads(Path(arguments).read_text()))
    Path(result).write_text(json.dumps(found, default=str))
