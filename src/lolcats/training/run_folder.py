"""The output folder of a run: whether it may be used, what decides its contents, and stages taken from another run."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lolcats.checkpoint.read import checkpoint_folder
from lolcats.config import LinearizeConfig, ModelSection, config_fingerprint
from lolcats.data import PackedDataset
from lolcats.errors import UserError
from lolcats.training.checkpoint import finished, refuse_changes

LOCK_FILE = ".lock"


class FolderLock:
    """Keeps other processes out of a folder; it ends with the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = folder, FileLock(folder / LOCK_FILE)
        self._made = False

    def __enter__(self) -> FolderLock:
        """Makes the folder if there is none."""
        if self._lock.is_locked:
            return self
        try:
            self._made = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"another process of lolcats is using {self.folder}; wait until it ends, or choose another folder"
            ) from None
        except OSError as error:
            raise UserError(f"cannot write to {self.folder}: {error}; choose another folder") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock.is_locked:
            with suppress(OSError):
                (self.folder / LOCK_FILE).unlink()
                if self._made:
                    self.folder.rmdir()  # if nothing was written
            self._lock.release()


def check_folder(config: LinearizeConfig, output: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that this run must not use; nothing is written."""
    if resume and overwrite:
        raise UserError("--resume continues a run and --overwrite begins again; choose one of them")
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; choose a folder for --output")
    if (output / "adapter_config.json").exists():
        raise UserError(f"{output} holds an adapter, which would change the new model: choose another --output")
    base = Path(config.model.path or "").expanduser()
    if output.exists() and base.exists() and output.samefile(base):
        raise UserError(f"{output} holds the model to be linearized, which must stay: choose another --output")
    saved = output / "run" / "config.yaml"
    if resume and saved.exists():
        refuse_changes(saved, config_fingerprint(LinearizeConfig.from_yaml(saved)), config_fingerprint(config))
    # a run that was killed at once leaves empty folders
    elif not overwrite and any(not path.is_dir() and path.name != LOCK_FILE for path in output.rglob("*")):
        missing = f" and holds no run to resume ({saved} does not exist)" if resume else ""
        raise UserError(
            f"{output} is not empty{missing}. Choose another --output, or pass --resume to continue a run, or"
            " --overwrite to begin again (the model in it is replaced, other files and the old run stay)"
        )


def claim_folder(config: LinearizeConfig, output: Path, *, overwrite: bool) -> None:
    """Write the configuration into `output/run`; nothing is deleted."""
    run = output / "run"
    try:
        if overwrite and run.exists():
            run.rename(next(p for number in itertools.count(1) if not (p := output / f"run-old-{number}").exists()))
        run.mkdir(parents=True, exist_ok=True)
        (run / ".config.yaml").write_text(config.to_yaml())
        (run / ".config.yaml").replace(run / "config.yaml")
    except OSError as error:
        raise UserError(f"cannot write to {output}: {error}; choose another --output") from error


def take_stages(source: Path, output: Path, names: list[str]) -> None:
    """Copy finished stages of another run, unless this one has begun its own."""
    for name in names:
        target = output / "run" / name
        if target.exists() or finished(source / "run" / name) is None:
            continue
        copy = output / "run" / f".{name}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source / "run" / name, copy)
        copy.rename(target)


WEIGHT_FILES = (".safetensors", ".bin", ".json", ".jinja")


def identity(config: LinearizeConfig, *stages: str, weights: str, validation: PackedDataset) -> dict[str, Any]:
    """Of what a run makes in, or measures after, these stages: plain values, by which changes are named."""
    data = {"fingerprint": validation.info["fingerprint"]}
    return config_fingerprint(config, *stages) | {"base": {"weights": weights}, "validation": data}


def weights_hash(section: ModelSection) -> str:
    """Hash of a checkpoint's name, revision and files: names, sizes and contents, of large ones 4 KiB of each MiB."""
    digest = hashlib.sha256(json.dumps([section.path, section.revision]).encode())
    folder = checkpoint_folder(str(section.path), section.revision)
    for file in sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_FILES):
        with file.open("rb") as stream:
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode() + stream.read(1 << 20))
            for begin in (*range(0, size, 1 << (20 if size > 1 << 26 else 12)), max(0, size - (1 << 12))):
                stream.seek(begin)
                digest.update(stream.read(1 << 12))
    return digest.hexdigest()
