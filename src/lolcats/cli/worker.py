"""Runs commands one after another in one process, for sweeps: nothing is imported or compiled twice.

Each line of its input is the JSON of a command's words and of the file that its output is appended to; each line of its
output is that command's exit status.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import sys
import traceback

from lolcats.cli.app import app


def run(words: list[str]) -> int:
    """Run a command, its name among the words; errors are printed. Returns its exit status."""
    try:
        return int(app(words[1:], standalone_mode=False) or 0)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        gc.collect()  # models refer to themselves
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        words, file = json.loads(line)
        with open(file, "a", encoding="utf-8") as log:
            for stream in (1, 2):  # the descriptors themselves: libraries keep what they print to
                os.dup2(log.fileno(), stream)
            print("$", shlex.join(words), flush=True)
            status = run(words)
            sys.stdout.flush()
            sys.stderr.flush()
        print(status, file=answers, flush=True)


if __name__ == "__main__":
    main()
