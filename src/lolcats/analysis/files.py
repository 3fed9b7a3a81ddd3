"""The JSON files of an output folder, and how analyses write theirs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lolcats.errors import UserError

ANALYSIS_FILE = "analysis.json"
EVALUATION_FILE = "eval.json"


def write_text(file: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        UserError: it cannot be written; what was there before is untouched.
    """
    partial = file.with_name(f".{file.name}.unfinished")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error}") from error


def write_json(file: Path, values: Any) -> None:
    """`write_text` of a value as standard JSON: NaN and infinity, which that lacks, become null."""
    write_text(file, json.dumps(plain(values), indent=1, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """The value as standard JSON has it: keys are text, tuples lists, and numbers that it lacks None."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)
