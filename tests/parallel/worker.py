"""What the processes of a test do; started by ranks.py: worker.py ARGUMENTS.json RESULT.json"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lolcats.config import LinearizeConfig
from lolcats.errors import UserError
from lolcats.parallel.group import Group
from lolcats.parallel.launch import open_group
from lolcats.pipeline import linearize
from lolcats.training.attention_transfer import TransferStage

QUIET = Console(quiet=True)


def main(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One linearization after another in the same processes: its report, or its error's message.

    Args:
        runs: name -> settings, output, resume, and `fault`, what happens on rank 1. After an error in the last one the
            processes part, as after one that breaks their communication off.
    """
    results: dict[str, Any] = {}
    name = "begin"
    try:
        with open_group("cpu", 60) as group:
            results["main first"] = _main_fails_first(group)
            for name, run in runs.items():
                with _nan(group) if run.get("fault") == "nan" else nullcontext():
                    try:
                        config = LinearizeConfig.from_dict(run["settings"])
                        results[name] = linearize(config, Path(run["output"]), resume=run["resume"], console=QUIET)
                    except UserError as error:
                        if name == list(runs)[-1]:
                            raise
                        results[name] = str(error)
                group.gather(None)
    except UserError as error:
        results[name] = str(error)
    return results


def _main_fails_first(group: Group) -> dict[str, Any]:
    """Whether this rank ran a `main_first` block that rank 0 fails in, and what it raised."""
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


@contextmanager
def _nan(group: Group) -> Iterator[None]:
    """Rank 1 gets weights that are not finite, before its third micro-step."""
    original, calls = TransferStage.micro_step, 0

    def spoiling(self: TransferStage, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3 and group.rank == 1:
            with torch.no_grad():
                self.layers[max(self.layers)].q_weight.fill_(torch.nan)
        return original(self, *args)

    TransferStage.micro_step = spoiling
    try:
        yield
    finally:
        TransferStage.micro_step = original


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments, result = sys.argv[1:]
    found = main(json.loads(Path(arguments).read_text()))
    Path(result).write_text(json.dumps(found, default=str))
