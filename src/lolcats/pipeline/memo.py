"""Numbers that a resumed run does not measure again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lolcats.parallel.group import Group
from lolcats.training.checkpoint import read_json, write_json


class Memo:
    """Numbers measured once and kept in a file.

    Args:
        values: gets the numbers, by name.
    """

    def __init__(self, file: Path, values: dict[str, float], group: Group) -> None:
        self.file, self.values, self.group = file, values, group
        with group.sync_errors():
            if file.exists():
                values.update(read_json(file))

    def __call__(self, name: str, compute: Callable[[], float]) -> float:
        if name not in self.values:
            self.values[name] = compute()
            with self.group.sync_errors():
                if self.group.is_main:
                    write_json(self.file, self.values, what="the measured numbers")
        return self.values[name]
