"""Packed data on disk, found again by the hash of everything that decides it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from lolcats.data.packed import PackedDataset

DATA_FORMAT = 1  # raise when the same inputs would give other tokens, labels or files
ARRAYS = ("input_ids", "label_mask", "document_ids")

logger = logging.getLogger(__name__)


def cache_directory(chosen: Path | str | None) -> Path:
    """`chosen`, else $LOLCATS_CACHE, else ~/.cache/lolcats."""
    return Path(chosen or os.environ.get("LOLCATS_CACHE") or "~/.cache/lolcats").expanduser()


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


def load(directory: Path, names: tuple[str, ...]) -> tuple[PackedDataset, ...] | None:
    """The splits `names`, memory-mapped; None if they are not there or not whole."""
    loaded = []
    for name in names:
        try:
            info = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
            arrays = {
                array: np.load(directory / f"{name}-{array}.npy", mmap_mode="r", allow_pickle=False)
                for array in ARRAYS
                if array in info["shapes"]
            }
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError) as error:
            logger.warning("ignoring the damaged data cache %s (%s)", directory, error)
            return None
        if any(list(arrays[array].shape) != shape for array, shape in info["shapes"].items()):
            logger.warning("ignoring the damaged data cache %s", directory)
            return None
        loaded.append(
            PackedDataset(arrays["input_ids"], arrays["label_mask"], arrays.get("document_ids"), info["info"])
        )
    return tuple(loaded)


def save(directory: Path, splits: dict[str, PackedDataset]) -> bool:
    """Write `splits` into `directory`, all or nothing. False (and a warning) if the disk refuses."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        logger.warning("cannot cache the tokenised data in %s: %s", directory.parent, error)
        return False
    try:
        for name, data in splits.items():
            _write(partial, name, data)
        if load(directory, tuple(splits)) is not None:  # another process was quicker
            return True
        if directory.exists():
            shutil.rmtree(directory)
        os.rename(partial, directory)
        return True
    except OSError as error:
        logger.warning("cannot cache the tokenised data in %s: %s", directory.parent, error)
        return False
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(directory: Path, name: str, data: PackedDataset) -> None:
    shapes = {}
    for array in ARRAYS:
        values = getattr(data, array)
        if values is not None:
            with (directory / f"{name}-{array}.npy").open("wb") as stream:
                np.save(stream, values, allow_pickle=False)
                _sync(stream)
            shapes[array] = list(values.shape)
    with (directory / f"{name}.json").open("w", encoding="utf-8") as stream:
        json.dump({"shapes": shapes, "info": data.info}, stream, indent=1)
        _sync(stream)


def _sync(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())
