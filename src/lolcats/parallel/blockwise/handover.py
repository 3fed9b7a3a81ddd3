"""Spools between blocks: who writes them, who reads them, and when they are deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lolcats.config.fingerprint import differences
from lolcats.errors import UserError
from lolcats.parallel.blockwise.layout import Block
from lolcats.parallel.blockwise.run import SPLITS, BlockRun
from lolcats.parallel.blockwise.spool import Spool, check_space, delete_spool, used_bytes
from lolcats.training.durable_files import read_json, write_json

OWNER_FILE = "owner.json"


class Handover:
    """The inputs of all blocks but the first, as far as they exist.

    Args:
        folder: for their files; None: in memory.

    Raises:
        UserError: `folder` holds the hidden states of another run.
    """

    def __init__(self, run: BlockRun, folder: Path | None) -> None:
        self.run, self.folder = run, folder
        base: Any = run.partial.model.model
        spool_dtype = run.config.transfer.spool_dtype
        self.dtype = base.dtype if spool_dtype == "auto" else getattr(torch, spool_dtype)
        self.hidden = int(base.config.get_text_config().hidden_size)
        self._open: dict[tuple[int, str], Spool] = {}
        if folder is not None:
            self._claim(folder)

    def bytes_per_block(self) -> int:
        """What the inputs of one block take."""
        tokens = sum(len(self.run.used(split)) * self.run.datasets[split].input_ids.shape[1] for split in SPLITS)
        return tokens * self.hidden * self.dtype.itemsize

    def check_space(self, blocks: int) -> None:
        """Refuse to begin if the inputs of `blocks` blocks do not fit beside one another."""
        if self.folder is not None:
            needed = blocks * self.bytes_per_block() - used_bytes(self.folder)
            check_space(self.folder, needed, f"the hidden states of {blocks} blocks")

    def spools(self, block: Block) -> dict[str, Spool]:
        """The inputs of a block, empty at first."""
        for split in SPLITS:
            if (block.index, split) not in self._open:
                used = self.run.used(split)
                tokens = self.run.datasets[split].input_ids.shape[1]
                self._open[block.index, split] = Spool(self._path(block, split), used, tokens, self.hidden, self.dtype)
        return {split: self._open[block.index, split] for split in SPLITS}

    def is_complete(self, block: Block) -> bool:
        """Whether the inputs of `block` are all there."""
        if block.index == 0:
            return True
        for split in SPLITS:
            path = self._path(block, split)
            on_disk = path is not None and Spool.exists(path)
            if not on_disk and (block.index, split) not in self._open:
                return False
        return all(len(spool.missing()) == 0 for spool in self.spools(block).values())

    def sink(self, block: Block) -> SpoolSink | None:
        """Takes the outputs of `block`; None after the last block."""
        return None if block.is_last else SpoolSink(self.spools(self.run.blocks[block.index + 1]))

    def delete(self, block: Block) -> None:
        """The inputs of `block` are not needed any more."""
        for split in SPLITS:
            spool = self._open.pop((block.index, split), None)
            if spool is not None:
                spool.close()
            path = self._path(block, split)
            if path is not None:
                delete_spool(path)

    def _path(self, block: Block, split: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{block.name}-{split}"

    def _claim(self, folder: Path) -> None:
        owner = self.run.fingerprint_values | {
            split: self.run.datasets[split].info.get("fingerprint") for split in SPLITS
        }
        file = folder / OWNER_FILE
        if not file.exists():
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"cannot write to {folder}: {error}; choose another transfer.spool_folder") from error
            write_json(file, {"owner": owner}, what="whose hidden states the folder holds,")
            return
        changed = differences(read_json(file)["owner"], owner)
        if changed:
            raise UserError(
                f"{folder} holds the hidden states of another run, which differs in\n  "
                + "\n  ".join(changed)
                + "\nChoose another folder, or delete this one"
            )


def open_handover(run: BlockRun) -> Handover:
    """In memory or in files, as the configuration says."""
    transfer = run.config.transfer
    if transfer.spool == "memory":
        return Handover(run, None)
    return Handover(run, Path(transfer.spool_folder) if transfer.spool_folder else run.folder / "spool")


class SpoolSink:
    """Writes outputs into the next block's spools.

    On a GPU, copies to the host run while the next micro-step is computed: what `put` gets is written by the
    call after it, or by `flush`.
    """

    def __init__(self, spools: dict[str, Spool]) -> None:
        self.spools = spools
        self._waiting: tuple[str, np.ndarray, Tensor, Any] | None = None

    def put(self, split: str, rows: np.ndarray, hidden_BTD: Tensor) -> None:
        self.flush()
        if not np.isin(rows, self.spools[split].missing()).any():
            return
        hidden = hidden_BTD.detach()
        if hidden.device.type != "cuda":
            self.spools[split].write(rows, hidden)
            return
        copied = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
        copied.copy_(hidden, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(hidden.device))
        self._waiting = (split, rows, copied, done)

    def flush(self) -> None:
        if self._waiting is not None:
            split, rows, copied, done = self._waiting
            self._waiting = None
            done.synchronize()
            self.spools[split].write(rows, copied)
