"""Programs that a model wrote: each runs in a process of its own, with limits of time and memory, but no sandbox.

`load_metric` puts them in the place of the metric "code_eval", which lm-eval's tasks download from the hub.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SECONDS, MEMORY = 10, 4 << 30
_RUN = """import os, resource, runpy
for kind, limit in (resource.RLIMIT_AS, {memory}), (resource.RLIMIT_CPU, {seconds}), (resource.RLIMIT_FSIZE, 1 << 24):
    resource.setrlimit(kind, (limit, limit))
mkdir, leave = os.mkdir, os._exit
runpy.run_path("program.py", run_name="program")
mkdir({passed!r})
leave(0)
"""


def passes(program: str, seconds: int = SECONDS, memory: int = MEMORY) -> bool:
    """Whether a program gets past its last line within limits of time and of memory in bytes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        passed = os.path.join(folder, secrets.token_hex())  # a folder made after the last line
        command = [sys.executable, "-I", "-c", _RUN.format(memory=memory, seconds=seconds, passed=passed)]
        Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
        null = subprocess.DEVNULL
        process = subprocess.Popen(
            command, cwd=folder, env={}, stdin=null, stdout=null, stderr=null, start_new_session=True
        )
        try:
            return process.wait(seconds) == 0 and os.path.isdir(passed)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            process.wait()


def before_fence(answers: list[list[str]], _: Any) -> list[list[str]]:
    """Programs that begin inside of a block, without what follows it."""
    return [[answer.split("```")[0] for answer in row] for row in answers]


def load_metric(load: Any, name: str, *args: Any, **options: Any) -> Any:
    """`evaluate.load`, given as `load`, with these programs' metric."""
    return SimpleNamespace(compute=pass_at) if name == "code_eval" else load(name, *args, **options)


def pass_at(references: list[str], predictions: list[list[str]], k: list[int]) -> tuple[dict[str, float], Any]:
    """pass@k: the chance that one of k programs, out of those written for a task, passes its tests."""
    tasks = zip(predictions, references, strict=True)
    right = [[passes(f"{program}\n{tests}") for program in programs] for programs, tests in tasks]
    chances = {n: [math.comb(row.count(False), n) / math.comb(len(row), n) for row in right] for n in k}
    return {f"pass@{n}": 1.0 - sum(row) / len(row) for n, row in chances.items()}, right
