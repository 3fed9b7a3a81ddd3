"""The configuration of a linearization run: typed, validated, printed, saved.

One `LinearizeConfig` describes a run completely. It is read from a recipe (YAML), changed by command
line flags and `--set key=value` overrides, validated once, and saved beside the results.
"""

from __future__ import annotations

from lolcats.config.data import DataSection
from lolcats.config.data import DataSource
from lolcats.config.model import AttentionSection
from lolcats.config.model import ModelSection
from lolcats.config.reading import merge
from lolcats.config.reading import parse_override
from lolcats.config.reading import read_yaml
from lolcats.config.run import LinearizeConfig
from lolcats.config.run import OutputSection
from lolcats.config.section import Section
from lolcats.config.training import AdjustSection
from lolcats.config.training import OptimSection
from lolcats.config.training import ParallelSection
from lolcats.config.training import TransferSection

__all__ = [
    "AdjustSection",
    "AttentionSection",
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
