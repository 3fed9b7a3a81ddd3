"""What decides an artefact of a run: resuming, kept measurements and the report go by it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from lolcats.checkpoint.read import checkpoint_folder
from lolcats.config import LinearizeConfig, ModelSection, config_fingerprint
from lolcats.data import PackedDataset
from lolcats.data.cache import content_hash

WEIGHT_FILES = (".safetensors", ".bin", ".gguf", ".json", ".jinja")


@dataclass(frozen=True)
class ArtefactIdentity:
    """Of what a run makes in, or measures after, one of its stages.

    Attributes:
        settings: see `config_fingerprint`.
        weights: of the base model, which is the teacher; see `weights_hash`.
        validation: fingerprint of the validation data.
        heads: that are exact, where they are chosen already.
    """

    settings: dict[str, Any]
    weights: str
    validation: str
    heads: list[str] | None = None

    @classmethod
    def of(
        cls,
        config: LinearizeConfig,
        *stages: str,
        weights: str,
        validation: PackedDataset,
        heads: list[str] | None = None,
    ) -> ArtefactIdentity:
        """After these `stages`."""
        return cls(config_fingerprint(config, *stages), weights, validation.info["fingerprint"], heads)

    @property
    def values(self) -> dict[str, Any]:
        """Plain values, by which changes are named."""
        return self.settings | {"base": {"weights": self.weights}, "validation": {"fingerprint": self.validation}}

    @property
    def key(self) -> str:
        return content_hash(asdict(self))


def weights_hash(section: ModelSection) -> str:
    """Hash of a checkpoint's name and revision and of its files' names, sizes, first and last MiB."""
    digest = hashlib.sha256(json.dumps([section.path, section.revision, section.gguf_file]).encode())
    folder = checkpoint_folder(str(section.path), section.revision)
    for file in sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_FILES):
        with file.open("rb") as stream:
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode() + stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read())
    return digest.hexdigest()
