"""The configuration of a linearization run: typed, validated, printed, saved.

One `LinearizeConfig` describes a run completely. It is read from a recipe (YAML), changed by command
line flags and `--set key=value` overrides, validated once, and saved beside the results.
"""

from __future__ import annotations

from lolcats.config.attention import AttentionConfig
from lolcats.config.reading import merge, parse_override, read_yaml, set_fields, validated
from lolcats.config.run import RESUME_MUTABLE_FIELDS, LinearizeConfig, config_fingerprint, differences
from lolcats.config.sections import (
    AdjustSection,
    DataSection,
    DataSource,
    GatesSection,
    ModelSection,
    OptimSection,
    OutputSection,
    ParallelSection,
    Section,
    TransferSection,
)

__all__ = [
    "RESUME_MUTABLE_FIELDS",
    "AdjustSection",
    "AttentionConfig",
    "DataSection",
    "DataSource",
    "GatesSection",
    "LinearizeConfig",
    "ModelSection",
    "OptimSection",
    "OutputSection",
    "ParallelSection",
    "Section",
    "TransferSection",
    "config_fingerprint",
    "differences",
    "merge",
    "parse_override",
    "read_yaml",
    "set_fields",
    "validated",
]
