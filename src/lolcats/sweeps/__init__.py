"""Sweep files that come with the package: the paper's ablations on a model of 135 million parameters.

The first line of every file is a comment that describes it in one sentence.
"""

from __future__ import annotations

from pathlib import Path

from lolcats.recipes import find_file, list_files

FOLDER = Path(__file__).parent


def list_sweeps() -> dict[str, str]:
    """Name -> one-line description, in alphabetical order."""
    return list_files(FOLDER)


def sweep_path(name_or_path: str | Path) -> Path:
    """`lolcats.recipes.find_file` of a sweep."""
    return find_file("sweep", FOLDER, name_or_path)
