"""The state of one sequence, to continue from as often as wanted: in memory, and on disk as safetensors."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lolcats.errors import UserError

FORMAT = "lolcats snapshot 2"
_TOKENS = "token_ids"
# Values read from each parameter. A state fits only the weights that made it. Reading all of them would take
# as long as loading the model; training changes practically every value of what it trains, so that a few
# values of every parameter distinguish any two trained models.
SAMPLES = 64
# Entries of a configuration that say where a model came from, not what it computes.
IGNORED = frozenset(
    {"_name_or_path", "architectures", "auto_map", "dtype", "provenance", "torch_dtype", "transformers_version"}
)


@dataclass(frozen=True)
class Snapshot:
    """All that a sequence needs to continue.

    The last token is always outside the state: feeding it gives the logits of the next one, so that none
    need to be kept.

    Attributes:
        token_ids: all tokens so far.
        length: how many of them the state holds; fewer than all.
        tensors: the state of each layer, as `SlotCache.read` gives it. Its size does not depend on `length`,
            except for exact heads.
        fingerprint: `model_fingerprint` of the model that made it.
        note: JSON values to keep beside the state.
    """

    token_ids: list[int]
    length: int
    tensors: dict[str, Tensor]
    fingerprint: str
    note: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def save(self, file: str | Path) -> None:
        """Write to `file`, whole or not at all.

        Raises:
            UserError: the file cannot be written.
        """
        path = Path(file)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        tensors[_TOKENS] = torch.tensor(self.token_ids, dtype=torch.int32)
        metadata = {"format": FORMAT, "fingerprint": self.fingerprint, "length": str(self.length)}
        metadata["note"] = json.dumps(self.note, ensure_ascii=False)
        metadata["sha256"] = _checksum(tensors, metadata)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            save_file(tensors, str(unfinished), metadata=metadata)
            os.replace(unfinished, path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot write the state to {path}: {error}") from error
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, file: str | Path) -> Snapshot:
        """Read what `save` wrote.

        Raises:
            UserError: the file is missing, damaged, or no snapshot.
        """
        path = Path(file)
        try:
            with safe_open(str(path), framework="pt") as stored:
                metadata = dict(stored.metadata() or {})
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  # not a dict
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read the state in {path}: {error}") from error
        if metadata.get("format") != FORMAT:
            raise UserError(f"{path} is not a saved state: format {metadata.get('format')!r}, expected {FORMAT!r}")
        if metadata.pop("sha256", None) != _checksum(tensors, metadata):
            raise UserError(f"{path} is damaged: its checksum does not fit its contents. Make the state again")
        tokens, note = tensors.pop(_TOKENS).tolist(), json.loads(metadata["note"])
        return cls(tokens, int(metadata["length"]), tensors, metadata["fingerprint"], note)


def _checksum(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """SHA-256 of names, types, shapes and bytes of all tensors, and of the metadata."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@torch.no_grad()
def model_fingerprint(model: Any) -> str:
    """SHA-256 of the configuration, and of the name, shape, type and some values of every parameter.

    Values are taken at even distances, the first and the last included.
    """
    digest = hashlib.sha256()
    config = _without(model.config.to_dict())
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode())
        count = parameter.numel()
        if count == 0 or parameter.is_meta:
            continue
        place = torch.linspace(0, count - 1, min(SAMPLES, count), dtype=torch.float64).long()
        index = torch.unravel_index(place.to(parameter.device), parameter.shape)
        digest.update(parameter[index].cpu().double().numpy().tobytes())
    return digest.hexdigest()


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without(item) for key, item in value.items() if key not in IGNORED}
    return value
