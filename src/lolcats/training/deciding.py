"""Which fields of a configuration decide the trained weights."""

from __future__ import annotations

from typing import Any

from lolcats.config import LinearizeConfig
from lolcats.training.loop import NOT_DECIDING


def deciding(config: LinearizeConfig, *stages: str) -> dict[str, Any]:
    """The fields of the configuration that decide the weights after the given stages, as plain values."""
    values = config.model_dump(mode="json", include={"model", "attention", "data", "seed", *stages})
    values["model"].pop("device")
    for stage in stages:
        for name in NOT_DECIDING - {"enabled"}:
            values[stage].pop(name, None)
    return values
