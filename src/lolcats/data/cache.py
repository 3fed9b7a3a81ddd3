"""Packed data on disk, found again by the hash of everything that decides it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lolcats.data.packed import PackedDataset

DATA_FORMAT = 3  # raise when the same inputs would give other tokens, labels or files
ARRAYS = ("input_ids", "label_mask")

logger = logging.getLogger(__name__)


def cache_directory() -> Path:
    """$LOLCATS_CACHE, else ~/.cache/lolcats."""
    return Path(os.environ.get("LOLCATS_CACHE") or "~/.cache/lolcats").expanduser()


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 of what decides a tokenizer's output: vocabulary, rules, special tokens, chat template."""
    if getattr(tokenizer, "is_fast", False):
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        # Calls leave their truncation and padding behind here; every call sets them anew.
        rules.pop("truncation", None)
        rules.pop("padding", None)
    else:
        rules = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    return content_hash(
        {"rules": rules, "eos": tokenizer.eos_token_id, "specials": tokenizer.all_special_tokens}
        | {"chat": getattr(tokenizer, "chat_template", None)}
    )


def content_hash(value: Any) -> str:
    """sha256 of a value's JSON text with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def load_or_build(
    directory: Path, names: tuple[str, ...], build: Callable[[], tuple[PackedDataset, ...]]
) -> tuple[PackedDataset, ...]:
    """The splits `names` from the cache; if they are not there, what `build` makes, which is kept for the next time."""
    splits = load(directory, names)
    if splits is None:
        splits = build()
        if save(directory, dict(zip(names, splits, strict=True))):
            splits = load(directory, names) or splits
    return splits


def load(directory: Path, names: tuple[str, ...]) -> tuple[PackedDataset, ...] | None:
    """The splits `names`, memory-mapped; None if they are not there or not whole."""
    loaded = []
    try:
        for name in names:
            saved = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
            arrays = {
                array: np.load(directory / f"{name}-{array}.npy", mmap_mode="r", allow_pickle=False)
                for array in saved["shapes"]
            }
            if any(list(arrays[array].shape) != shape for array, shape in saved["shapes"].items()):
                raise ValueError("arrays of another shape")
            loaded.append(PackedDataset(**arrays, info=saved["info"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        logger.warning("ignoring the damaged data cache %s (%s)", directory, error)
        return None
    return tuple(loaded)


def save(directory: Path, splits: dict[str, PackedDataset]) -> bool:
    """Write `splits` into `directory`, all or nothing. False (and a warning) if the disk refuses."""
    parent = directory.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=parent) as folder:
            partial = Path(folder) / "splits"
            partial.mkdir()
            for split, data in splits.items():
                _write(partial, split, data)
            if load(directory, tuple(splits)) is None:  # no other process was quicker
                shutil.rmtree(directory, ignore_errors=True)
                os.rename(partial, directory)
    except OSError as error:
        logger.warning("cannot cache the tokenised data in %s: %s", parent, error)
        return False
    return True


def _write(directory: Path, name: str, data: PackedDataset) -> None:
    arrays = {array: getattr(data, array) for array in ARRAYS}
    for array, values in arrays.items():
        with (directory / f"{name}-{array}.npy").open("wb") as stream:
            np.save(stream, values, allow_pickle=False)
            stream.flush()
            os.fsync(stream)
    shapes = {array: values.shape for array, values in arrays.items()}
    (directory / f"{name}.json").write_text(json.dumps({"shapes": shapes, "info": data.info}), encoding="utf-8")
