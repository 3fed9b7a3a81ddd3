"""What a result depends on, written beside it: versions, commit, hardware, time."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("lolcats", "torch", "transformers", "peft", "datasets", "safetensors", "triton", "liger-kernel", "numpy")


def provenance() -> dict[str, Any]:
    """Versions, source commit, machine and UTC time, as plain JSON values."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "versions": versions,
        "python": platform.python_version(),
        "commit": source_commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def source_commit() -> str | None:
    """Commit of the checkout that lolcats runs from ("+" appended if files changed); None if installed.

    Where the source was copied without its repository, LOLCATS_COMMIT in the environment says it.
    """
    if os.environ.get("LOLCATS_COMMIT"):
        return os.environ["LOLCATS_COMMIT"]
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if folder.parent.parent != Path(git("rev-parse", "--show-toplevel")):
            return None  # some other repository around an installed copy
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
