"""A whole run, which of its settings go together, and which decide its result."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import model_validator

from lolcats.config.attention import AttentionConfig
from lolcats.config.reading import read_yaml, validated
from lolcats.config.sections import (
    SHORTEST_TEXT,
    AdjustSection,
    DataSection,
    DataSource,
    GatesSection,
    ModelSection,
    OutputSection,
    ParallelSection,
    Section,
    TransferSection,
)


class LinearizeConfig(Section):
    """Everything that decides the result of `lolcats linearize`."""

    recipe: str | None = None
    """Name of the recipe this started from."""
    model: ModelSection = ModelSection()
    attention: AttentionConfig = AttentionConfig()
    data: DataSection = DataSection()
    transfer: TransferSection = TransferSection()
    gates: GatesSection = GatesSection()
    adjust: AdjustSection = AdjustSection()
    output: OutputSection = OutputSection()
    parallel: ParallelSection = ParallelSection()
    seed: int = 0

    @model_validator(mode="wrap")
    @classmethod
    def _as_attention_config(cls, values: Any, validate: Callable[[Any], LinearizeConfig]) -> LinearizeConfig:
        """`attention.linear_length_cap: auto` is stage 1's training length, where there are two parts to weigh;
        `attention.exact` may be written in one line."""
        attention = values.get("attention") if isinstance(values, dict) else None
        if not isinstance(attention, dict):
            return validate(values)
        if isinstance(attention.get("exact"), str | int):
            attention = attention | {"exact": [part for part in str(attention["exact"]).split(",") if part]}
            values = values | {"attention": attention}
        if attention.get("linear_length_cap") != "auto":
            return validate(values)
        config = validate(values | {"attention": attention | {"linear_length_cap": 0}})
        if config.attention.has_both_parts:
            data = config.data
            if (own := config.transfer.data) is not None and "sequence_length" in own.model_fields_set:
                data = own  # which is completed later
            config.attention = replace(config.attention, linear_length_cap=data.sequence_length)
        return config

    @model_validator(mode="after")
    def _complete_stage_data(self) -> LinearizeConfig:
        """A stage's own data in full: fields that it omits, and "data.sources" in its mixture, are those of `data`."""
        for stage in ("transfer", "adjust"):
            section = getattr(self, stage)
            if section.data is None:
                continue
            given = {name: getattr(section.data, name) for name in section.data.model_fields_set}
            if self.data.sources:
                given["sources"] = mixed(given.get("sources", self.data.sources), self.data.sources)
            data = DataSection.model_validate(dict(self.data) | given)
            measured = {source.path: self.data.held_out(source) for source in self.data.sources}
            for place, source in enumerate(data.sources):  # none of the rows that the result is measured on
                if data.held_out(source) < (rows := measured.get(source.path, 0)):
                    data.sources[place] = source.model_copy(update={"validation_rows": rows})
            setattr(self, stage, section.model_copy(update={"data": data}))
        return self

    @property
    def stages(self) -> list[str]:
        """Those that a run goes through."""
        teaches = not self.adjust.softmax_control
        gates = self.attention.exact_budget is not None and teaches
        return ["transfer"] * (self.transfer.enabled and teaches) + ["gates"] * gates + ["adjust"] * self.adjust.enabled

    def data_of(self, stage: str) -> DataSection:
        """What a stage, "transfer" or "adjust", trains on."""
        return getattr(self, stage).data or self.data

    @model_validator(mode="after")
    def _goes_together(self) -> LinearizeConfig:
        if self.transfer.enabled and self.transfer.block_mode != "joint" and (refused := self.refused_in_blocks()):
            raise ValueError(refused)
        for stage in ("transfer", "adjust"):
            data, trains = self.data_of(stage), getattr(self, stage).enabled
            if trains and data.sequence_length < SHORTEST_TEXT and "retrieval" in [x.path for x in data.sources]:
                raise ValueError(
                    f"data.sequence_length={data.sequence_length} in stage {stage}, whose source retrieval needs at"
                    f" least {SHORTEST_TEXT}: raise it, or leave that source out, as the recipe lolcats-linear does"
                )
        return self

    def refused_in_blocks(self) -> str | None:
        """Why stage 1 cannot run on some layers at a time, and what to change; None: it can."""
        if self.transfer.select_by != "loss":
            setting, advice = f"transfer.select_by={self.transfer.select_by}", "use select_by=loss"
        elif self.attention.exact_budget is not None and not self.adjust.enabled:
            setting, advice = "attention.exact as a budget", "name the heads, or let stage 2 follow (adjust.enabled)"
        else:
            return None
        return f"{setting} needs the whole model, which training block by block never loads; {advice}"

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LinearizeConfig:
        return validated(cls, values)

    @classmethod
    def from_yaml(cls, path: str | Path) -> LinearizeConfig:
        return cls.from_dict(read_yaml(path))


def mixed(mixture: list[DataSource], sources: list[DataSource]) -> list[DataSource]:
    """The mixture with `sources` in the place of "data.sources", whose weight they share by their own."""
    total = sum(source.weight for source in sources)
    found: list[DataSource] = []
    for entry in mixture:
        shared = [source.model_copy(update={"weight": entry.weight * source.weight / total}) for source in sources]
        found += shared if entry.path == "data.sources" else [entry]
    return found


RESUME_MUTABLE_FIELDS = frozenset(
    {"checkpoint_every", "micro_batch_size", "gradient_checkpointing", "fused_kernels", "cuda_graphs"}
)
"""Fields of the stages' sections that may change on resuming: they do not decide the result (beyond rounding)."""


def config_fingerprint(config: LinearizeConfig, *stages: str) -> dict[str, Any]:
    """The fields of the configuration that decide the weights after the given stages, as plain values.

    A budget of exact heads is spent after stage 1; how they keep their keys, and a window of theirs in bytes, matter
    only then.
    """
    excluded = {"model": {"device"}} | {stage: set(RESUME_MUTABLE_FIELDS) for stage in stages}
    sections = {"seed", "model", "attention", "data", *stages}
    values = config.model_dump(mode="json", include=sections, exclude=excluded)
    if config.attention.exact_budget is not None and "adjust" not in stages:
        values["attention"] |= {"exact": [], "cache_bits": None}
        if isinstance(config.attention.exact_window, str):
            values["attention"]["exact_window"] = None
    return values


def differences(saved: dict[str, Any], current: dict[str, Any], prefix: str = "") -> list[str]:
    """One line for each key, written `section.key`, whose plain values differ."""
    lines = []
    for key in sorted(set(saved) | set(current)):
        old, new = saved.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {json.dumps(old)} before, {json.dumps(new)} now")
    return lines
