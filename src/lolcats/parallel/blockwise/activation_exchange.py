"""Activation caches between blocks: which exist, who writes them, and when they are deleted."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lolcats.config import differences
from lolcats.errors import UserError
from lolcats.parallel.blockwise.activation_cache import ActivationCache, delete_cache, gib
from lolcats.parallel.blockwise.layers import LayerBlock
from lolcats.training.checkpoint import read_json, write_json

OWNER_FILE = "owner.json"


class ActivationExchange:
    """The inputs of all blocks but the first, as far as they exist.

    Args:
        folder: for their files.
        blocks: of the model.
        sequences: split -> numbers [N] of the sequences that are cached, ascending.
        tokens, hidden: T and the width of a hidden state.
        owner: plain values that decide the hidden states.

    Raises:
        UserError: `folder` holds the hidden states of another owner.
    """

    def __init__(
        self,
        folder: Path,
        blocks: list[LayerBlock],
        sequences: Mapping[str, np.ndarray],
        *,
        tokens: int,
        hidden: int,
        dtype: torch.dtype,
        owner: dict[str, Any],
    ) -> None:
        self.folder, self.blocks, self.sequences = folder, blocks, sequences
        self.tokens, self.hidden, self.dtype = tokens, hidden, dtype
        self._open: dict[int, dict[str, ActivationCache]] = {}
        _claim(folder, owner)

    def check_space(self, blocks: int) -> None:
        """Refuse to begin if the inputs of `blocks` blocks do not fit beside one another."""
        rows = sum(len(numbers) for numbers in self.sequences.values())
        needed = blocks * rows * self.tokens * self.hidden * self.dtype.itemsize
        needed -= sum(file.stat().st_blocks * 512 for file in self.folder.glob("*.data"))
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise UserError(
                f"the hidden states of {blocks} blocks need {gib(needed)} in {self.folder}, where {gib(free)} are free."
                " Choose another folder, larger blocks (transfer.block_layers) or fewer tokens"
            )

    def caches(self, block: LayerBlock) -> dict[str, ActivationCache] | None:
        """The inputs of a block by split, empty at first; None for the first block, which starts from the tokens."""
        if block.index == 0:
            return None
        if block.index not in self._open:
            shape = (self.tokens, self.hidden, self.dtype)
            self._open[block.index] = {
                split: ActivationCache(path, self.sequences[split], *shape)
                for split, path in self._paths(block).items()
            }
        return self._open[block.index]

    def is_complete(self, block: LayerBlock) -> bool:
        """Whether the inputs of `block` are all there; nothing is made."""
        there = all(ActivationCache.exists(path) for path in self._paths(block).values())
        if block.index and block.index not in self._open and not there:
            return False
        return all(len(cache.missing()) == 0 for cache in (self.caches(block) or {}).values())

    def writer(self, block: LayerBlock) -> CacheWriter | None:
        """Takes the outputs of `block`; None after the last block."""
        following = None if block.is_last else self.caches(self.blocks[block.index + 1])
        return None if following is None else CacheWriter(following)

    def delete(self, block: LayerBlock) -> None:
        """The inputs of `block` are not needed any more."""
        for cache in self._open.pop(block.index, {}).values():
            cache.close()
        for path in self._paths(block).values():
            delete_cache(path)

    def _paths(self, block: LayerBlock) -> dict[str, Path]:
        """Of the caches by split."""
        return {split: self.folder / f"{block.name}-{split}" for split in self.sequences}


class CacheWriter:
    """Writes a block's outputs into the next block's caches.

    On a GPU, copies to the host run while the next micro-step is computed: what `put` gets is written by the
    call after it, or by `flush`.
    """

    def __init__(self, caches: dict[str, ActivationCache]) -> None:
        self.caches = caches
        self._waiting: tuple[str, np.ndarray, Tensor, Any] | None = None

    def put(self, split: str, sequences: np.ndarray, hidden_BTD: Tensor) -> None:
        self.flush()
        if not np.isin(sequences, self.caches[split].missing()).any():
            return
        hidden = hidden_BTD.detach()
        if hidden.device.type != "cuda":
            self.caches[split].write(sequences, hidden)
            return
        copied = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
        copied.copy_(hidden, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(hidden.device))
        self._waiting = (split, sequences, copied, done)

    def flush(self) -> None:
        if self._waiting is not None:
            split, sequences, copied, done = self._waiting
            self._waiting = None
            done.synchronize()
            self.caches[split].write(sequences, copied)


def _claim(folder: Path, owner: dict[str, Any]) -> None:
    file = folder / OWNER_FILE
    if not file.exists():
        with suppress(OSError):  # the write below says it better
            folder.mkdir(parents=True, exist_ok=True)
        write_json(file, {"owner": owner})
    elif changed := differences(read_json(file)["owner"], owner):
        raise UserError(
            f"{folder} holds the hidden states of another run, which differs in\n  "
            + "\n  ".join(changed)
            + "\nChoose another folder, or delete this one"
        )
