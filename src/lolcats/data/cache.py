"""Packed data on disk, found again by the hash of everything that decides it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lolcats.data.packed import PackedDataset

DATA_FORMAT = 6  # raise when the same inputs would give other tokens, labels or files
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


def load_or_build(file: Path, build: Callable[[], dict[str, PackedDataset]]) -> dict[str, PackedDataset]:
    """Data by split from the cache; if they are not there, what `build` makes, which is kept for the next time."""
    try:
        return load(file)
    except (OSError, SafetensorError) as error:
        if file.exists():
            logger.warning("ignoring the damaged data cache %s (%s)", file, error)
    splits = build()
    try:
        save(file, splits)
    except OSError as error:
        logger.warning("cannot cache the tokenised data in %s: %s", file.parent, error)
        return splits
    return load(file)


def load(file: Path) -> dict[str, PackedDataset]:
    """Data by split in alphabetical order, memory-mapped."""
    with safe_open(file, "pt") as stored:
        return {
            split: PackedDataset(
                **{array: stored.get_tensor(f"{split}/{array}").numpy() for array in ARRAYS}, info=json.loads(info)
            )
            for split, info in sorted(stored.metadata().items())
        }


def save(file: Path, splits: dict[str, PackedDataset]) -> None:
    """Write data by split, all or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    for left in file.parent.glob(".unfinished-*"):  # by a process that was killed
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > 86400:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=file.parent) as folder:
        partial = Path(folder) / file.name
        arrays = {f"{split}/{array}": getattr(data, array) for split, data in splits.items() for array in ARRAYS}
        save_file(arrays, partial, {split: json.dumps(data.info) for split, data in splits.items()})
        partial.replace(file)
