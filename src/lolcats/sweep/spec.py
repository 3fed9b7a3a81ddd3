"""What a sweep file says, and the runs that follow from it."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from lolcats.config import DataSource, LinearizeConfig, Section, merge, parse_override, read_yaml
from lolcats.config.fingerprint import config_fingerprint
from lolcats.errors import UserError
from lolcats.recipes import load_recipe

KEY_VERSION = 1
"""Part of every key: raise it when the default of a field that decides results changes. New fields need nothing."""
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class Evaluate(Section):
    """What is measured on every finished model beside perplexities, as by `lolcats eval`."""

    tasks: str
    """As for `lolcats eval --tasks`: "paper", names of lm-eval tasks, "passkey"."""
    data_dir: str | None = None
    """Folder with the tasks' records; null: from the hub."""
    limit: int | None = Field(None, ge=1)
    """Questions of each task; null: all."""
    lengths: list[int] = [2048, 8192]
    """passkey: tokens of the texts."""
    per_decile: int = Field(10, ge=1)
    """passkey: texts for each tenth of depth."""
    sparse_cache: int | None = Field(None, ge=0)
    """Tokens per head that linearized models keep exact beside the state while they are evaluated; null: as trained."""
    cache_by: Literal["recall", "leverage"] | None = None
    """Which ones, as `attention.cache_by`; null: as trained."""
    linear_length_cap: int | None = Field(None, ge=0)
    """As `attention.linear_length_cap`, while they are evaluated; null: as trained."""

    def how(self) -> dict[str, Any]:
        """How it is measured, beside what: the settings other than the defaults."""
        return self.model_dump(mode="json", exclude={"tasks", "data_dir"}, exclude_defaults=True)


class Sweep(Section):
    """A sweep file."""

    recipe: str
    """Name or file of the recipe that all runs start from."""
    paths: dict[str, str | None] = {}
    """Names for data sets, written "{name}" in values; `--path name=PATH` replaces them. null: must be given."""
    overrides: dict[str, Any] = Field({}, alias="set")
    """Fields that all runs share: `section.key: value`."""
    axes: dict[str, dict[str, dict[str, Any]] | list[Any]] = {}
    """The grid is the product of the axes. An axis is a field with a list of values, or a name with labelled
    groups of fields; the key `recipe` in a group starts these runs from another recipe."""
    skip: list[dict[str, str]] = []
    """Combinations to leave out: axis -> label."""
    seeds: list[int] = [0]
    """Every combination runs with each seed."""
    held_out: dict[str, DataSource] = {}
    """Texts on which every finished model's perplexity is measured, by the name in the table."""
    held_out_sequences: int | None = Field(None, ge=1)
    """At most so many packed sequences of each."""
    held_out_length: int | None = Field(None, ge=2)
    """Tokens of these sequences; null: those of the run's training sequences."""
    evaluate: Evaluate | None = None
    """Evaluations of every finished model."""

    def held_out_how(self) -> dict[str, Any]:
        """What the held-out perplexities are measured on, other than defaults; {}: there are none."""
        fields = {"held_out", "held_out_sequences", "held_out_length"}
        return self.model_dump(mode="json", include=fields, exclude_defaults=True) if self.held_out else {}


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        name: its folder; made of its labels and seed.
        case: axis -> label.
        config: complete.
    """

    name: str
    case: dict[str, str]
    seed: int
    config: LinearizeConfig

    @property
    def key(self) -> str:
        """Hash of all that decides the run's result: equal ones need to run once."""
        return _hash(self.config, "transfer", "adjust", "output")

    @property
    def transfer_key(self) -> str | None:
        """Hash of all that decides stage 1; None if the run has none."""
        if not self.config.transfer.enabled or self.config.adjust.softmax_control:
            return None
        return _hash(self.config, "transfer")


def read_sweep(
    file: str | Path,
    *,
    model: str | None = None,
    data: list[dict[str, Any]] | None = None,
    paths: dict[str, str] | None = None,
    overrides: Iterable[str] = (),
    seeds: list[int] | None = None,
    evaluate: Evaluate | None = None,
) -> tuple[Sweep, list[Run]]:
    """A sweep file's runs, in the order of its axes, all validated.

    Later wins: recipe, `set`, model, data, the run's labels, overrides, seed.

    Args:
        model: replaces the recipes' model.
        data: replaces the recipes' data sources; refused where an axis is about them.
        paths: replaces paths of the file, by name.
        overrides: "section.key=value", for every run.
        seeds: replaces the file's.
        evaluate: replaces the file's.

    Raises:
        UserError: with the run and the field that is wrong.
    """
    sweep = _validated(file)
    _check_paths(sweep, paths or {}, file)
    known = sweep.paths | (paths or {})
    common: dict[str, Any] = {}
    for field, value in sweep.overrides.items():
        common = merge(common, _nested(field, value))
    if model is not None:
        common = merge(common, {"model": {"path": model}})
    if data is not None:
        common = merge(common, {"data": {"sources": data}})
    changes: dict[str, Any] = {}
    for text in overrides:
        changes = merge(changes, parse_override(text))
    axes = _axes(sweep)
    if data is not None and any("data.sources" in fields for axis in axes.values() for fields in axis.values()):
        raise UserError(f"{file} compares data sets, so --data would replace what differs; use --path NAME=PATH")

    runs = []
    for labels in itertools.product(*(axis.items() for axis in axes.values())):
        case = {axis: label for axis, (label, _) in zip(axes, labels, strict=True)}
        if any(all(case.get(axis) == label for axis, label in left.items()) for left in sweep.skip):
            continue
        recipe, chosen = sweep.recipe, dict(common)
        for _, fields in labels:
            for field, value in fields.items():
                if field == "recipe":
                    recipe = value
                else:
                    chosen = merge(chosen, _nested(field, value))
        values = merge(merge(load_recipe(recipe), chosen), changes)
        for seed in sweep.seeds if seeds is None else seeds:
            name = "-".join([*(_slug(sweep, axis, label) for axis, label in case.items()), f"seed{seed}"])
            runs.append(_run(name, case, seed, _filled(values, known, file), file))
    _check_names(runs, file)
    held_out = {
        name: source.model_copy(update={"path": _filled(source.path, known, file)})
        for name, source in sweep.held_out.items()
    }
    chosen_evaluation = evaluate or sweep.evaluate
    if chosen_evaluation is not None:
        folder = _filled(chosen_evaluation.data_dir, known, file)
        chosen_evaluation = chosen_evaluation.model_copy(update={"data_dir": folder})
    return sweep.model_copy(update={"held_out": held_out, "evaluate": chosen_evaluation}), runs


def _run(name: str, case: dict[str, str], seed: int, values: dict[str, Any], file: str | Path) -> Run:
    try:
        config = LinearizeConfig.from_dict(merge(values, {"seed": seed}))
    except UserError as error:
        raise UserError(f"{file}, run {name}: {error}") from error
    if config.model.path is None or not config.data.sources:
        raise UserError(f"{file}, run {name}: no model or no data; give --model and --data, or a recipe that has them")
    return Run(name, case, seed, config)


def _validated(file: str | Path) -> Sweep:
    try:
        return Sweep.model_validate(read_yaml(file))
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, item['loc'])) or 'sweep'}: {item['msg']}" for item in error.errors()]
        raise UserError(f"{file} is not a valid sweep:\n" + "\n".join(lines)) from error


def _check_paths(sweep: Sweep, given: dict[str, str], file: str | Path) -> None:
    unknown = sorted(set(given) - set(sweep.paths))
    if unknown:
        raise UserError(f"--path {unknown[0]}: {file} names the paths {', '.join(sweep.paths) or '(none)'}")


def _axes(sweep: Sweep) -> dict[str, dict[str, dict[str, Any]]]:
    """Axis -> label -> fields."""
    axes = {}
    for name, axis in sweep.axes.items():
        axes[name] = {_label(value): {name: value} for value in axis} if isinstance(axis, list) else axis
    return axes


def _check_names(runs: list[Run], file: str | Path) -> None:
    names = [run.name for run in runs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{file}: two runs would be called {twice[0]}; give their labels or seeds different names")
    if not runs:
        raise UserError(f"{file}: no run is left; check axes, skip and seeds")


def _filled(value: Any, paths: dict[str, str | None], file: str | Path) -> Any:
    """The value with every "{name}" of `paths` replaced."""
    if isinstance(value, dict):
        return {key: _filled(item, paths, file) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, paths, file) for item in value]
    if not isinstance(value, str):
        return value

    def path(match: re.Match[str]) -> str:
        name = match[1]
        if name not in paths:
            return match[0]
        found = paths[name]
        if found is None:
            raise UserError(f"{file} needs the path of {name!r}: give --path {name}=FILE")
        return found

    return _PLACEHOLDER.sub(path, value)


def _nested(field: str, value: Any) -> dict[str, Any]:
    for key in reversed(field.split(".")):
        value = {key: value}
    return value


def _label(value: Any) -> str:
    if isinstance(value, list):
        return "".join(map(str, value)) if all(len(str(item)) == 1 for item in value) else "+".join(map(str, value))
    return "none" if value is None else str(value)


def _slug(sweep: Sweep, axis: str, label: str) -> str:
    """A label as part of a folder's name; a bare value says of which field."""
    text = f"{axis.split('.')[-1]}_{label}" if isinstance(sweep.axes[axis], list) else label
    return re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("_") or "_"


def _hash(config: LinearizeConfig, *sections: str) -> str:
    # Without defaults: rows from before a field existed still count.
    values = config_fingerprint(config, *sections, defaults=False) | {"version": KEY_VERSION}
    for section in sections:
        if not getattr(getattr(config, section), "enabled", True):
            values[section] = {"enabled": False}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
