"""The folder of one stage's run: its checkpoints, its best weights, its result, and the settings that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lolcats.config import differences
from lolcats.errors import UserError
from lolcats.parallel.group import SINGLE, Group
from lolcats.training.checkpoint import (
    STATE_FILE,
    Checkpoint,
    CorruptCheckpoint,
    checkpoint_path,
    list_checkpoints,
    read_checkpoint,
    read_json,
    remove_checkpoint,
    remove_unfinished,
    step_of,
    write_checkpoint,
    write_json,
)
from lolcats.training.stage import TrainState

DONE_FILE = "done.json"


@dataclass
class StageFolder:
    """Holds `step-<n>/` (the last checkpoint), `best-<n>/` (the best weights) and, in the end, `done.json`.

    Best weights carry their step in the name, because those that the last checkpoint refers to must outlive
    better ones found after it: a resumed run goes back to them.

    Args:
        fingerprint: plain JSON values; what other values wrote is refused.
        report: receives sentences for the user.
        group: the run's processes; all of them call every method, and rank 0 tidies up.
        parameters: the trained ones by name; what is read back comes sharded as they are.
    """

    path: Path
    fingerprint: dict[str, Any]
    report: Callable[[str], None]
    group: Group = SINGLE
    parameters: dict[str, Tensor] | None = None
    best_of_last_checkpoint: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        if self.group.is_main:
            remove_unfinished(self.path)
        self.group.barrier()

    def refuse_used(self) -> None:
        """Raises UserError if a run was begun here."""
        steps = list_checkpoints(self.path, "step")
        used = [*steps, *list_checkpoints(self.path, "best"), *self.path.glob(DONE_FILE)]
        if used:
            raise UserError(
                f"{self.path} already holds a run ({used[0].name}, ...);"
                " resume it with --resume, replace it by --overwrite, or choose another folder"
            )

    def finished(self) -> TrainState | None:
        """The result, if the stage has ended."""
        path = self.path / DONE_FILE
        if not path.exists():
            return None
        try:
            done = read_json(path)
        except CorruptCheckpoint as error:
            self.report(f"{error}; resuming from the last checkpoint")
            return None
        refuse_changes(path, done["fingerprint"], self.fingerprint)
        return TrainState(**done["result"])

    def finish(self, result: TrainState) -> None:
        """Record the result of a stage whose last checkpoint is written."""
        self._prune("step", {result.steps})
        self._prune("best", {result.best_step})
        values = {"fingerprint": self.fingerprint, "result": asdict(result)}
        with self.group.sync_errors():
            if self.group.is_main:
                write_json(self.path / DONE_FILE, values)

    def latest(self) -> Checkpoint | None:
        """The last checkpoint; None if there is none.

        Raises:
            CorruptCheckpoint: it is damaged, or the best weights are.
            UserError: it is of other settings.
        """
        paths = list_checkpoints(self.path, "step")
        if not paths:
            return None
        try:
            loaded = self._read(paths[-1])
            refuse_changes(paths[-1], loaded.state["fingerprint"], self.fingerprint)
            # best weights are needed only at the end; if they are damaged, say so before training continues
            self.best_of_last_checkpoint = loaded.state["best_step"]
            self.best_weights(self.best_of_last_checkpoint)
        except CorruptCheckpoint as error:
            raise self.group.common(
                CorruptCheckpoint(f"{error}\nMove {self.path} away to start this stage from its beginning.")
            ) from None
        return loaded

    def save(self, step: int, best_step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """Write a checkpoint, then remove those before it."""
        path = checkpoint_path(self.path, "step", step)
        state = {**state, "best_step": best_step, "fingerprint": self.fingerprint}
        write_checkpoint(path, tensors, state, self.group)
        self.best_of_last_checkpoint = best_step
        self._prune("step", {step})
        self._prune("best", {best_step})

    def save_best(self, step: int, metric: float, weights: dict[str, Tensor]) -> None:
        path = checkpoint_path(self.path, "best", step)
        state = {"metric": metric, "fingerprint": self.fingerprint}
        write_checkpoint(path, {"weights": weights}, state, self.group)
        self._prune("best", {step, self.best_of_last_checkpoint})

    def best_weights(self, step: int) -> dict[str, Tensor]:
        return self._read(checkpoint_path(self.path, "best", step)).tensors["weights"]

    def last_checkpoint(self) -> str:
        """A sentence on the last checkpoint."""
        saved = list_checkpoints(self.path, "step")
        return f"The last good checkpoint is {saved[-1]}." if saved else "No checkpoint had been written yet."

    def _read(self, path: Path) -> Checkpoint:
        return read_checkpoint(path, self.parameters, self.group)

    def _prune(self, kind: str, keep: set[int]) -> None:
        if not self.group.is_main:
            return
        for path in list_checkpoints(self.path, kind):
            if step_of(path) not in keep:
                remove_checkpoint(path)


def refuse_other_settings(directory: Path, fingerprint: dict[str, Any]) -> None:
    """Raises UserError if the run of a stage in `directory`, where there is one, has another fingerprint.

    What is damaged is not looked at.
    """
    for path in (directory / DONE_FILE, *(saved / STATE_FILE for saved in list_checkpoints(directory, "step")[-1:])):
        with suppress(CorruptCheckpoint):
            content = read_json(path)
            refuse_changes(path, content.get("state", content)["fingerprint"], fingerprint)


def refuse_changes(path: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raises UserError, by name, if settings that decide the result are not those `saved` in `path`."""
    changes = differences(saved, current)
    if changes:
        raise UserError(
            f"{path} comes from a run with other settings, so it cannot be resumed:\n  "
            + "\n  ".join(changes)
            + "\nRestore these settings, or start anew in another folder or with --overwrite."
        )
