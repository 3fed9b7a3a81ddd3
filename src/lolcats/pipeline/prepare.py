"""What is checked and made ready before anything costs time."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from lolcats.config import LinearizeConfig
from lolcats.config.fingerprint import config_fingerprint, differences
from lolcats.errors import UserError
from lolcats.training.checkpoint import read_json, write_json


def prepare_folder(config: LinearizeConfig, output: Path, *, resume: bool, overwrite: bool) -> None:
    """Make the output folder ours, without deleting anything in it.

    Raises:
        UserError: it holds something else, or a run of another configuration, or cannot be written.
    """
    run = output / "run"
    if resume and overwrite:
        raise UserError("--resume goes on with a run and --overwrite begins again; choose one of them")
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; choose a folder for --output")
    saved = run / "config.yaml"
    if resume and saved.exists():
        before = LinearizeConfig.from_yaml(saved)
        changed = differences(config_fingerprint(before), config_fingerprint(config))
        if changed:
            raise UserError(
                f"{saved} was made with another configuration; it differs in\n  "
                + "\n  ".join(changed)
                + "\nUse the same options to resume, or another --output"
            )
    elif output.exists() and any(output.iterdir()) and not overwrite and not resume:
        raise UserError(
            f"{output} is not empty. Choose another --output, or pass --resume to go on with the run in it, or"
            " --overwrite to begin again (files of the same names are replaced, nothing else is deleted)"
        )
    try:
        if overwrite and run.exists():
            run.rename(_unused(output, "run-old"))
        run.mkdir(parents=True, exist_ok=True)
        saved.write_text(config.to_yaml())
    except OSError as error:
        raise UserError(f"cannot write to {output}: {error}; choose another --output") from error


def take_stage_1(source: Path, output: Path) -> None:
    """Copy the finished stage 1 of another run, unless this one has begun its own.

    Args:
        source, output: the runs' folders. That their settings up to stage 1 agree is checked when it is read.

    Raises:
        UserError: `source` has not finished its stage 1.
    """
    if (output / "run" / "transfer").exists():
        return
    if not (source / "run" / "transfer" / "done.json").is_file():
        raise UserError(f"--transfer-from {source}: there is no finished stage 1 in it")
    copy = output / "run" / ".transfer"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(source / "run" / "transfer", copy)
    measured = read_json(source / "run" / "perplexity.json")
    before = {name: value for name, value in measured.items() if name in ("teacher", "swapped", "transfer")}
    write_json(output / "run" / "perplexity.json", before, what="the measured numbers")
    copy.rename(output / "run" / "transfer")


def _unused(folder: Path, stem: str) -> Path:
    return next(path for number in itertools.count(1) if not (path := folder / f"{stem}-{number}").exists())


def check_weights(config: LinearizeConfig, sharded: bool) -> None:
    """Refuse what cannot be together with weights that are quantised or divided among processes."""
    if config.model.load_in_4bit and config.adjust.enabled and config.adjust.method == "full":
        raise UserError("adjust.method=full trains all weights, which model.load_in_4bit keeps in 4 bits; use lora")
    if not sharded:
        return
    if config.model.load_in_4bit:
        raise UserError(
            "model.load_in_4bit: weights in 4 bits are not divided among processes; set parallel.shard=off, so that"
            " every process holds all of them"
        )
    if config.model.gguf_file is not None:
        raise UserError(
            f"model.gguf_file={config.model.gguf_file}: GGUF files are not read in parts; set parallel.shard=off, so"
            " that every process holds the whole model, or convert the file to safetensors"
        )
    if config.data.top_esl is not None:
        raise UserError(
            f"data.top_esl={config.data.top_esl} measures lengths under the whole model; set parallel.shard=off"
        )
