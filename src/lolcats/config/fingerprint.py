"""Which settings decide the trained weights, and in which ones two runs differ."""

from __future__ import annotations

import json
from typing import Any

from lolcats.config.run import LinearizeConfig

RESUME_MUTABLE_FIELDS = frozenset(
    {
        "checkpoint_every",
        "micro_batch_size",
        "gradient_checkpointing",
        "fused_kernels",
        "cuda_graphs",
        "job_folder",
        "activation_cache",
        "activation_cache_folder",
    }
)
"""Fields of the stages' sections that may change on resuming: they do not decide the result (beyond rounding)."""


def config_fingerprint(config: LinearizeConfig, *stages: str, defaults: bool = True) -> dict[str, Any]:
    """The fields of the configuration that decide the weights after the given stages, as plain values.

    Args:
        defaults: with the fields that have their default value.
    """
    sections = {"model", "attention", "data", *stages}
    values = config.model_dump(mode="json", include={"seed", *sections}, exclude_defaults=not defaults)
    values.get("model", {}).pop("device", None)
    for stage in stages:
        for name in RESUME_MUTABLE_FIELDS:
            values.get(stage, {}).pop(name, None)
    return values if defaults else {name: value for name, value in values.items() if value != {}}


def differences(saved: dict[str, Any], current: dict[str, Any], prefix: str = "") -> list[str]:
    """One line for each key, written `section.key`, whose plain values differ."""
    lines = []
    for key in sorted(set(saved) | set(current)):
        old = saved.get(key)
        new = current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {json.dumps(old)} before, {json.dumps(new)} now")
    return lines
