"""Every kind of row of scaling_row.py, one after another in one group of processes: scaling_kinds.py FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from rich.console import Console
from scaling_row import RowBench, run

from lolcats.parallel.launch import open_group

KINDS: dict[str, dict[str, Any]] = {
    "stage 1, sharded": {},
    "stage 1, replicated": {"mode": "replicated"},
    "stage 1, pipelined": {"mode": "pipelined", "accumulate": 2},
    "stage 2": {"stage": "adjust", "accumulate": 2},
    "stage 2, checkpointing and offload": {"stage": "adjust", "gradient_checkpointing": True, "cpu_offload": True},
    "export to nothing": {"stage": "export"},
    "export to a disk": {"stage": "export", "sink": "disk"},
}
TINY = {"model": "tiny", "tokens": 32, "seconds": 0.01, "dtype": "float32", "device": "cpu"}

if __name__ == "__main__":
    with open_group("cpu") as group:
        found = {name: run(RowBench(**TINY | kind), group, Console(quiet=True)) for name, kind in KINDS.items()}
        if group.is_main:
            Path(sys.argv[1]).write_text(json.dumps(found))
