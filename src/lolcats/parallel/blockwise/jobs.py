"""Blocks as independent jobs over hidden states that one pass of the original model wrote.

A job folder holds everything but the base model's weights: `config.yaml`, `job.json`, `data/` (the packed
sequences), `inputs/` (activation caches, a pair per block) and `blocks/` (one folder of checkpoints per block). Any
machine that sees the folder and the model can train a block; blocks do not wait for one another.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from lolcats.config import LinearizeConfig, differences
from lolcats.data import cache
from lolcats.data.packed import PackedDataset, fingerprint
from lolcats.errors import UserError
from lolcats.parallel.blockwise.activation_exchange import ActivationExchange
from lolcats.parallel.blockwise.transfer import SPLITS, BlockwiseTransfer, open_transfer
from lolcats.training.checkpoint import read_json, write_json
from lolcats.training.identity import ArtefactIdentity, weights_hash
from lolcats.training.run_folder import LOCK_FILE, FolderLock

CONFIG_FILE = "config.yaml"
JOB_FILE = "job.json"


def prepare(config: LinearizeConfig, folder: Path, console: Console) -> None:
    """Make a job folder: pack the data and write the inputs of every block. Repeat a call that was preempted.

    Raises:
        UserError: the folder holds something else, the disk has no room, or whatever loading refuses.
    """
    with FolderLock(folder):
        _prepare(config, folder, console)


def _prepare(config: LinearizeConfig, folder: Path, console: Console) -> None:
    file = folder / JOB_FILE
    if not file.is_file() and folder.exists() and any(path.name != LOCK_FILE for path in folder.iterdir()):
        raise UserError(f"{folder} is not empty and no job folder; choose another one")
    transfer = open_transfer(config, folder / "blocks", console)
    content = {
        "identity": transfer.identity.values,
        "data": {split: transfer.datasets[split].info for split in SPLITS},
    }
    if file.is_file():
        _refuse_changes(folder, read_json(file), content)
    exchange = transfer.exchange(folder / "inputs")
    exchange.check_space(len(transfer.blocks) - 1)
    shutil.rmtree(folder / "data", ignore_errors=True)  # it may be damaged
    if not cache.save(folder / "data", transfer.datasets):
        raise UserError(f"cannot write the packed data to {folder / 'data'}; make room and repeat")
    try:
        (folder / CONFIG_FILE).write_text(config.to_yaml())
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error}") from error
    write_json(file, content)
    for block, following in zip(transfer.blocks, transfer.blocks[1:], strict=False):
        if not exchange.is_complete(following):
            console.print(f"passing the data through {block}, of {len(transfer.blocks)} blocks")
            transfer.run_block(block, exchange, train=False)
    console.print(f"{folder} is complete: {len(transfer.blocks)} blocks to train with `lolcats blocks train`")


def train_one(folder: Path, number: int, console: Console, *, device: str | None = None) -> None:
    """Train a block of a job folder, or resume its training.

    Args:
        device: in place of the configuration's.

    Raises:
        UserError: no such block, no job folder, or the block's inputs are not complete.
    """
    transfer, exchange = _open(folder, console, device)
    if not 0 <= number < len(transfer.blocks):
        raise UserError(f"--block {number}: {folder} has the blocks 0 to {len(transfer.blocks) - 1}")
    block = transfer.blocks[number]
    if not exchange.is_complete(block):
        raise UserError(
            f"the inputs of {block} are not complete in {folder / 'inputs'}; run `lolcats blocks prepare` again, which"
            " resumes where it was"
        )
    with FolderLock(transfer.folder / block.name):
        transfer.run_block(block, exchange, write=False)


def open_finished(
    folder: Path, console: Console, config: LinearizeConfig | None = None, *, device: str | None = None
) -> BlockwiseTransfer:
    """A job folder's blocks, to be assembled.

    Args:
        config: of the run that takes the blocks; its identity must be that of the blocks. None: the folder's.
        device: in place of the configuration's; a budget of exact heads needs a pass of the model there.
    """
    transfer = _open(folder, console, device)[0]
    if config is not None:
        own, weights, validation = transfer.identity, weights_hash(config.model), transfer.datasets["validation"]
        wanted = ArtefactIdentity.of(config, "transfer", weights=weights, validation=validation).values
        wanted["transfer"]["block_mode"] = own.settings["transfer"]["block_mode"]
        _refuse_changes(folder, own.values, wanted)
        transfer.config = config
    return transfer


def _open(folder: Path, console: Console, device: str | None) -> tuple[BlockwiseTransfer, ActivationExchange]:
    file = folder / JOB_FILE
    if not file.is_file():
        raise UserError(f"{folder} is no job folder (it has no {JOB_FILE}); make one with `lolcats blocks prepare`")
    config = LinearizeConfig.from_yaml(folder / CONFIG_FILE)
    content = read_json(file)
    if device is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
    datasets = _load_data(folder / "data", content["data"])
    transfer = open_transfer(config, folder / "blocks", console, datasets=datasets)
    _refuse_changes(folder, content["identity"], transfer.identity.values)
    return transfer, transfer.exchange(folder / "inputs")


def _refuse_changes(folder: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    changed = differences(saved, now)
    if changed:
        raise UserError(f"{folder} was prepared with other settings:\n  " + "\n  ".join(changed))


def _load_data(folder: Path, info: dict[str, dict[str, Any]]) -> dict[str, PackedDataset]:
    loaded = cache.load(folder, SPLITS)
    if loaded is None:
        raise UserError(f"the packed data in {folder} cannot be read; prepare the job folder again")
    for split, data in zip(SPLITS, loaded, strict=True):
        if fingerprint(*(getattr(data, name) for name in cache.ARRAYS)) != info[split]["fingerprint"]:
            raise UserError(
                f"the packed data in {folder} have changed since they were written; prepare the job folder again"
            )
    return dict(zip(SPLITS, loaded, strict=True))
