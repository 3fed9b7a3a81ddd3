"""The configuration of a linearization run: typed, validated, printed, saved.

One `LinearizeConfig` describes a run completely. It is read from a recipe (YAML), changed by command
line flags and `--set key=value` overrides, validated once, and saved beside the results.
"""

from __future__ import annotations

from lolcats.config.attention import AttentionConfig
from lolcats.config.data import DataSection, DataSource
from lolcats.config.model import ModelSection
from lolcats.config.reading import merge, parse_override, read_yaml
from lolcats.config.run import LinearizeConfig, OutputSection
from lolcats.config.section import Section
from lolcats.config.training import AdjustSection, OptimSection, ParallelSection, TransferSection

__all__ = [
    "AdjustSection",
    "AttentionConfig",
    "DataSection",
    "DataSource",
    "LinearizeConfig",
    "ModelSection",
    "OptimSection",
    "OutputSection",
    "ParallelSection",
    "Section",
    "TransferSection",
    "merge",
    "parse_override",
    "read_yaml",
]
