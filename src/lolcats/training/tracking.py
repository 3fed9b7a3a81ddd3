"""Training curves in TensorBoard, Weights & Biases or trackio, through accelerate's trackers."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from lolcats.errors import UserError


def check_tracker(name: str) -> None:
    if find_spec(name) is None:
        raise UserError(f"--track {name} needs a package: pip install {name}, or --set output.track=null")


def open_tracker(name: str, folder: Path, settings: dict[str, Any], stage: str, step: int) -> GeneralTracker:
    """The tracker's run of a stage; TensorBoard replaces what was logged from `step` on."""
    PartialState()  # accelerate's trackers ask it who they are; it takes up the processes' group as it is
    options: dict[str, Any] = {"name": f"{folder.resolve().parents[1].name}-{stage}", "config": settings}
    if name == "tensorboard":
        options = {"logging_dir": folder, "purge_step": step}
    tracker = LOGGER_TYPE_TO_CLASS[name](stage if name == "tensorboard" else "lolcats", **options)
    tracker.start()
    return tracker
