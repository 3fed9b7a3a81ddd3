"""Blocks as independent jobs over hidden states that one pass of the original model wrote.

A job folder holds everything but the base model's weights: `config.yaml`, `job.json`, `data/` (the packed
sequences), `inputs/` (hidden states, one pair of caches per block) and `blocks/` (one folder of checkpoints per
block). Any machine that sees the folder and the model can train a block; blocks do not wait for one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from lolcats.config import LinearizeConfig
from lolcats.config.fingerprint import config_fingerprint, differences
from lolcats.data.packed import PackedDataset, fingerprint
from lolcats.errors import UserError
from lolcats.parallel.blockwise.activation_exchange import ActivationExchange
from lolcats.parallel.blockwise.run import SPLITS, BlockwiseTransfer, open_run
from lolcats.parallel.blockwise.streaming import forward_block, train_block
from lolcats.training.checkpoint import list_checkpoints, read_json, step_of, write_json
from lolcats.training.progress import make_progress

CONFIG_FILE = "config.yaml"
JOB_FILE = "job.json"
_ARRAYS = ("input_ids", "label_mask", "document_ids")


@dataclass(frozen=True)
class BlockState:
    """How far a block is.

    Attributes:
        block: in words.
        inputs: whether its inputs are all there.
        step: of its last checkpoint; None: not begun.
        validation_loss: of the best weights; None: not finished.
    """

    block: str
    inputs: bool
    step: int | None
    validation_loss: float | None


def prepare(config: LinearizeConfig, folder: Path, console: Console) -> None:
    """Make a job folder: pack the data and write the inputs of every block. A killed call is repeated.

    Raises:
        UserError: the folder holds something else, the disk has no room, or whatever loading refuses.
    """
    file = folder / JOB_FILE
    if not file.is_file() and folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty and no job folder; choose another one")
    run = open_run(config, folder / "blocks", config_fingerprint(config, "transfer"), report=console.print)
    content = {
        "fingerprint_values": run.fingerprint_values,
        "data": {split: run.datasets[split].info for split in SPLITS},
    }
    if file.is_file():
        _refuse_changes(folder, read_json(file), content)
    exchange = ActivationExchange(run, folder / "inputs")
    exchange.check_space(len(run.blocks) - 1)
    _save_data(run.datasets, folder / "data")
    try:
        (folder / CONFIG_FILE).write_text(config.to_yaml())
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error}") from error
    write_json(file, content, what="the description of the jobs")
    for block, following in zip(run.blocks, run.blocks[1:], strict=False):
        if not exchange.is_complete(following):
            console.print(f"passing the data through {block}, of {len(run.blocks)} blocks")
            forward_block(run, exchange, block)
    console.print(f"{folder} is complete: {len(run.blocks)} blocks to train with `lolcats blocks train`")


def train_one(folder: Path, number: int, console: Console, *, device: str | None = None) -> None:
    """Train a block of a job folder, or go on with it.

    Args:
        device: in place of the configuration's.

    Raises:
        UserError: no such block, no job folder, or the block's inputs are not complete.
    """
    run, exchange = _open(folder, console, device)
    if not 0 <= number < len(run.blocks):
        raise UserError(f"--block {number}: {folder} has the blocks 0 to {len(run.blocks) - 1}")
    block = run.blocks[number]
    if not exchange.is_complete(block):
        raise UserError(
            f"the inputs of {block} are not complete in {folder / 'inputs'}; run `lolcats blocks prepare` again, which"
            " goes on where it was"
        )
    train_block(run, exchange, block, resume=True, write=False)


def open_finished(folder: Path, console: Console, config: LinearizeConfig | None = None) -> BlockwiseTransfer:
    """A job folder's run, to be assembled.

    Args:
        config: of the run that takes the blocks; it must decide the same as that which they were trained with.
    """
    run = _open(folder, console, "cpu")[0]
    if config is not None:
        wanted = config_fingerprint(config, "transfer")
        wanted["transfer"]["block_mode"] = run.fingerprint_values["transfer"]["block_mode"]
        _refuse_changes(folder, run.fingerprint_values, wanted)
    return run


def status(folder: Path, console: Console) -> list[BlockState]:
    """How far the blocks of a job folder are."""
    run, exchange = _open(folder, console, "cpu")
    states = []
    for block in run.blocks:
        result = run.finished(block)
        saved = list_checkpoints(run.folder / block.name, "step")
        step = step_of(saved[-1]) if saved else None
        loss = None if result is None else result.best_metric
        states.append(BlockState(str(block), exchange.is_complete(block), step, loss))
    return states


def _open(folder: Path, console: Console, device: str | None) -> tuple[BlockwiseTransfer, ActivationExchange]:
    file = folder / JOB_FILE
    if not file.is_file():
        raise UserError(f"{folder} is no job folder (it has no {JOB_FILE}); make one with `lolcats blocks prepare`")
    config = LinearizeConfig.from_yaml(folder / CONFIG_FILE)
    content = read_json(file)
    _refuse_changes(folder, content, content | {"fingerprint_values": config_fingerprint(config, "transfer")})
    if device is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
    datasets = {split: _load_data(folder / "data", split, content["data"][split]) for split in SPLITS}
    run = open_run(
        config,
        folder / "blocks",
        content["fingerprint_values"],
        datasets=datasets,
        progress=lambda: make_progress(console=console),
        report=console.print,
    )
    return run, ActivationExchange(run, folder / "inputs")


def _refuse_changes(folder: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    changed = differences(saved, now)
    if changed:
        raise UserError(f"{folder} was prepared with other settings:\n  " + "\n  ".join(changed))


def _save_data(datasets: dict[str, PackedDataset], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split, data in datasets.items():
            for name in _ARRAYS:
                array = getattr(data, name)
                if array is not None:
                    np.save(folder / f"{split}-{name}.npy", array)
    except OSError as error:
        raise UserError(f"cannot write the packed data to {folder}: {error}; make room and repeat") from error


def _load_data(folder: Path, split: str, info: dict[str, Any]) -> PackedDataset:
    arrays: dict[str, Any] = {}
    try:
        for name in _ARRAYS:
            file = folder / f"{split}-{name}.npy"
            arrays[name] = np.load(file, mmap_mode="r") if name != "document_ids" or file.exists() else None
    except (OSError, ValueError) as error:
        raise UserError(f"the packed data in {folder} cannot be read ({error}); prepare the folder again") from error
    if fingerprint(*(arrays[name] for name in _ARRAYS)) != info["fingerprint"]:
        raise UserError(f"the packed data in {folder} have changed since they were written; prepare the folder again")
    return PackedDataset(**arrays, info=info)
