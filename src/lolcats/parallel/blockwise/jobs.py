"""Blocks as independent jobs over hidden states that one pass of the original model wrote.

A job folder holds everything but the base model's weights: `config.yaml`, `job.json`, `data.safetensors` (the
packed sequences), `inputs/` (activation caches, a pair per block) and `blocks/` (one folder of checkpoints per
block). Any machine that sees the folder and the model can train a block; blocks do not wait for one another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors import SafetensorError

from lolcats.config import LinearizeConfig, differences, merge
from lolcats.conversion import stage_section
from lolcats.data import PackedDataset, build_datasets, cache
from lolcats.data.build import moved
from lolcats.errors import UserError
from lolcats.parallel.blockwise.blocks import Blocks
from lolcats.parallel.blockwise.partial_model import PartialModel, load_in_parts
from lolcats.report import read_optional, write_text
from lolcats.training.identity import identity, weights_hash
from lolcats.training.loop import warn_of_few_updates
from lolcats.training.run_folder import LOCK_FILE, FolderLock

CONFIG_FILE = "config.yaml"
JOB_FILE = "job.json"
DATA_FILE = "data.safetensors"


def prepare(config: LinearizeConfig, folder: Path, console: Console) -> None:
    """Make a job folder: pack the data and write the inputs of every block. Repeat a call that was preempted.

    Raises:
        UserError: the folder holds something else, the disk has no room, or whatever loading refuses.
    """
    with FolderLock(folder):
        _prepare(_with_jobs(config, folder), folder, console)


def _prepare(config: LinearizeConfig, folder: Path, console: Console) -> None:
    file = folder / JOB_FILE
    if not file.is_file() and folder.exists() and any(path.name != LOCK_FILE for path in folder.iterdir()):
        raise UserError(f"{folder} is not empty and no job folder; choose another one")
    partial, tokenizer = load_in_parts(config)
    section = stage_section(config, "transfer", partial.model.model)
    vocabulary = partial.model.config.text_config.vocab_size
    train, validation = build_datasets(section, tokenizer, seed=config.seed, vocabulary=vocabulary)
    data = {"train": train, "validation": validation}
    own = _identity(config, data)
    content = {"identity": own, "data": {split: packed.info for split, packed in data.items()}}
    if file.is_file():
        _refuse_changes(folder, read_optional(file), content)
    blocks = Blocks(config, partial, data, folder / "blocks", own, console, inputs=folder / "inputs")
    warn_of_few_updates("transfer", config.transfer, len(data["train"]), console)
    try:
        cache.save(folder / DATA_FILE, data)
        (folder / CONFIG_FILE).write_text(config.to_yaml())
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error}") from error
    write_text(file, json.dumps(content, indent=1))
    for block in blocks.blocks:
        blocks.caches(block)  # reserves their room
    for block, following in zip(blocks.blocks, blocks.blocks[1:], strict=False):
        if not blocks.has_inputs(following):
            console.print(f"passing the data through {block}, of {len(blocks.blocks)} blocks")
            blocks.run_block(block, train=False)
    console.print(f"{folder} is complete: {len(blocks.blocks)} blocks to train with `lolcats blocks train`")


def train_one(folder: Path, number: int, console: Console, *, device: str | None = None) -> None:
    """Train a block of a job folder, or resume its training."""
    config, data = job_config(folder, device), packed_data(folder)
    partial, _ = load_in_parts(config)
    data["train"] = moved(data["train"], stage_section(config, "transfer", partial.model.model))
    blocks = open_blocks(folder, config, partial, data, _identity(config, data), console)
    if not 0 <= number < len(blocks.blocks):
        raise UserError(f"--block {number}: {folder} has the blocks 0 to {len(blocks.blocks) - 1}")
    block = blocks.blocks[number]
    if not blocks.has_inputs(block):
        raise UserError(
            f"the inputs of {block} are not complete in {folder / 'inputs'}; run `lolcats blocks prepare` again, which"
            " resumes where it was"
        )
    with FolderLock(blocks.folder / block.name):
        blocks.run_block(block, write=False)


def job_config(folder: Path, device: str | None = None) -> LinearizeConfig:
    """The configuration of a run that takes a job folder's blocks."""
    _content(folder)
    config = LinearizeConfig.from_yaml(folder / CONFIG_FILE)
    return _with_jobs(config, folder, {} if device is None else {"model": {"device": device}})


def packed_data(folder: Path) -> dict[str, PackedDataset]:
    """The data of a job folder by split, at the positions of their tokens."""
    _content(folder)
    try:
        return cache.load(folder / DATA_FILE)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"the packed data in {folder} cannot be read ({error}); prepare the job folder again"
        ) from error


def open_blocks(
    folder: Path,
    config: LinearizeConfig,
    partial: PartialModel,
    data: Mapping[str, PackedDataset],
    own: dict[str, Any],
    console: Console,
) -> Blocks:
    """A job folder's blocks.

    Args:
        own: identity of the run that takes them, which must be that of the blocks.
    """
    _refuse_changes(folder, _content(folder)["identity"], own)
    return Blocks(config, partial, data, folder / "blocks", own, console, inputs=folder / "inputs")


def _content(folder: Path) -> dict[str, Any]:
    if (content := read_optional(folder / JOB_FILE)) is None:
        raise UserError(f"{folder} is no job folder (it has no {JOB_FILE}); make one with `lolcats blocks prepare`")
    return content


def _with_jobs(config: LinearizeConfig, folder: Path, changes: dict[str, Any] | None = None) -> LinearizeConfig:
    taken = {"transfer": {"block_mode": "jobs", "job_folder": str(folder)}}
    return LinearizeConfig.from_dict(merge(merge(config.model_dump(mode="json"), taken), changes or {}))


def _identity(config: LinearizeConfig, data: Mapping[str, PackedDataset]) -> dict[str, Any]:
    return identity(config, "transfer", weights=weights_hash(config.model), validation=data["validation"])


def _refuse_changes(folder: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    if changed := differences(saved, now):
        raise UserError(f"{folder} was prepared with other settings:\n  " + "\n  ".join(changed))
