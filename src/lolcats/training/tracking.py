"""Training curves in TensorBoard, Weights & Biases or trackio, through accelerate's trackers."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from lolcats.errors import UserError

PROJECT = "lolcats"


@dataclass(frozen=True)
class Tracking:
    """Where a run's training curves go. Its package is imported when the first stage begins."""

    name: str
    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if find_spec(self.name) is None:
            raise UserError(
                f"--track {self.name} needs the package {self.name}, which is not installed:"
                f" pip install {self.name}, or go without, with --set output.track=null"
            )

    def start(self, stage: str, step: int) -> GeneralTracker:
        """The tracker's run of a stage, for trackers want steps that only grow: a new one, or an interrupted one.

        Args:
            step: the first that will be logged; what was logged from there on is replaced where the tracker can.
        """
        PartialState()  # accelerate's trackers ask it who they are; it takes up the processes' group as it is
        self.folder.mkdir(parents=True, exist_ok=True)
        key_file = self.folder / f"{stage}.id"
        if step == 0 or not key_file.is_file():
            key_file.write_text(uuid4().hex[:8])
        key, group = key_file.read_text(), self.folder.resolve().parents[1].name
        same_run = {"name": f"{group}-{stage}-{key}", "group": group, "resume": "allow", "config": self.settings}
        project, options = {
            "tensorboard": (stage, {"logging_dir": self.folder, "purge_step": step}),
            "wandb": (PROJECT, {**same_run, "id": key, "dir": self.folder}),
            "trackio": (PROJECT, {**same_run, "embed": False}),
        }[self.name]
        tracker = LOGGER_TYPE_TO_CLASS[self.name](project, **options)
        tracker.start()
        return tracker
