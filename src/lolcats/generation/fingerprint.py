"""What tells one model's states from another's."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

# Values read from each parameter. A state fits only the weights that made it. Reading all of them would take
# as long as loading the model; training changes practically every value of what it trains, so that a few
# values of every parameter tell any two trained models apart.
SAMPLES = 64
# Entries of a configuration that say where a model came from, not what it computes.
IGNORED = frozenset(
    {"_name_or_path", "architectures", "auto_map", "dtype", "provenance", "torch_dtype", "transformers_version"}
)


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
