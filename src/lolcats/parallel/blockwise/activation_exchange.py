"""Spools between blocks: who writes them, who reads them, and when they are deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lolcats.config.fingerprint import differences
from lolcats.errors import UserError
from lolcats.parallel.blockwise.activation_cache import ActivationCache, check_space, delete_cache, used_bytes
from lolcats.parallel.blockwise.layers import LayerBlock
from lolcats.parallel.blockwise.run import SPLITS, BlockwiseTransfer
from lolcats.training.checkpoint import read_json, write_json

OWNER_FILE = "owner.json"


class ActivationExchange:
    """The inputs of all blocks but the first, as far as they exist.

    Args:
        folder: for their files; None: in memory.

    Raises:
        UserError: `folder` holds the hidden states of another run.
    """

    def __init__(self, run: BlockwiseTransfer, folder: Path | None) -> None:
        self.run, self.folder = run, folder
        base: Any = run.partial.model.model
        activation_cache_dtype = run.config.transfer.activation_cache_dtype
        self.dtype = base.dtype if activation_cache_dtype == "auto" else getattr(torch, activation_cache_dtype)
        self.hidden = int(base.config.get_text_config().hidden_size)
        self._open: dict[tuple[int, str], ActivationCache] = {}
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

    def caches(self, block: LayerBlock) -> dict[str, ActivationCache]:
        """The inputs of a block, empty at first."""
        for split in SPLITS:
            if (block.index, split) not in self._open:
                used = self.run.used(split)
                tokens = self.run.datasets[split].input_ids.shape[1]
                self._open[block.index, split] = ActivationCache(
                    self._path(block, split), used, tokens, self.hidden, self.dtype
                )
        return {split: self._open[block.index, split] for split in SPLITS}

    def is_complete(self, block: LayerBlock) -> bool:
        """Whether the inputs of `block` are all there."""
        if block.index == 0:
            return True
        for split in SPLITS:
            path = self._path(block, split)
            on_disk = path is not None and ActivationCache.exists(path)
            if not on_disk and (block.index, split) not in self._open:
                return False
        return all(len(cache.missing()) == 0 for cache in self.caches(block).values())

    def sink(self, block: LayerBlock) -> CacheWriter | None:
        """Takes the outputs of `block`; None after the last block."""
        return None if block.is_last else CacheWriter(self.caches(self.run.blocks[block.index + 1]))

    def delete(self, block: LayerBlock) -> None:
        """The inputs of `block` are not needed any more."""
        for split in SPLITS:
            cache = self._open.pop((block.index, split), None)
            if cache is not None:
                cache.close()
            path = self._path(block, split)
            if path is not None:
                delete_cache(path)

    def _path(self, block: LayerBlock, split: str) -> Path | None:
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
                raise UserError(
                    f"cannot write to {folder}: {error}; choose another transfer.activation_cache_folder"
                ) from error
            write_json(file, {"owner": owner}, what="whose hidden states the folder holds,")
            return
        changed = differences(read_json(file)["owner"], owner)
        if changed:
            raise UserError(
                f"{folder} holds the hidden states of another run, which differs in\n  "
                + "\n  ".join(changed)
                + "\nChoose another folder, or delete this one"
            )


def open_exchange(run: BlockwiseTransfer) -> ActivationExchange:
    """In memory or in files, as the configuration says."""
    transfer = run.config.transfer
    if transfer.activation_cache == "memory":
        return ActivationExchange(run, None)
    return ActivationExchange(
        run, Path(transfer.activation_cache_folder) if transfer.activation_cache_folder else run.folder / "activations"
    )


class CacheWriter:
    """Writes outputs into the next block's caches.

    On a GPU, copies to the host run while the next micro-step is computed: what `put` gets is written by the
    call after it, or by `flush`.
    """

    def __init__(self, caches: dict[str, ActivationCache]) -> None:
        self.caches = caches
        self._waiting: tuple[str, np.ndarray, Tensor, Any] | None = None

    def put(self, split: str, rows: np.ndarray, hidden_BTD: Tensor) -> None:
        self.flush()
        if not np.isin(rows, self.caches[split].missing()).any():
            return
        hidden = hidden_BTD.detach()
        if hidden.device.type != "cuda":
            self.caches[split].write(rows, hidden)
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
            self.caches[split].write(rows, copied)
