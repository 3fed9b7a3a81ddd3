"""What decides an artefact of a run: resuming and the report go by it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from lolcats.checkpoint.read import checkpoint_folder
from lolcats.config import LinearizeConfig, ModelSection, config_fingerprint
from lolcats.data import PackedDataset

WEIGHT_FILES = (".safetensors", ".bin", ".json", ".jinja")


def identity(config: LinearizeConfig, *stages: str, weights: str, validation: PackedDataset) -> dict[str, Any]:
    """Of what a run makes in, or measures after, these stages: plain values, by which changes are named."""
    data = {"fingerprint": validation.info["fingerprint"]}
    return config_fingerprint(config, *stages) | {"base": {"weights": weights}, "validation": data}


def weights_hash(section: ModelSection) -> str:
    """Hash of a checkpoint's name and revision and of its files' names, sizes, first and last MiB."""
    digest = hashlib.sha256(json.dumps([section.path, section.revision]).encode())
    folder = checkpoint_folder(str(section.path), section.revision)
    for file in sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_FILES):
        with file.open("rb") as stream:
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode() + stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read())
    return digest.hexdigest()
