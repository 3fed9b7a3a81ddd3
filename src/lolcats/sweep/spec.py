"""What a sweep file says, and the commands that follow from it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from lolcats.config import (
    DataSource,
    LinearizeConfig,
    Section,
    config_fingerprint,
    explain,
    parse_override,
    read_yaml,
    set_fields,
)
from lolcats.errors import UserError
from lolcats.recipes import load_recipe

EVALUATION_FILE = "eval.json"


class Evaluate(Section):
    """Options of `lolcats eval` for every finished model, by their names there."""

    tasks: str
    data_dir: str | None = None
    limit: int | None = Field(None, ge=1)
    lengths: list[int] = [2048, 8192]
    haystack: str | None = None
    per_decile: int = Field(10, ge=1)
    linear_length_cap: int | None = Field(None, ge=0)


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


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        name: its folder; made of its labels and seed.
        case: axis -> label.
        recipe, fields: what `lolcats linearize` gets, `fields` by --set.
        config: what that makes.
    """

    name: str
    case: dict[str, str]
    seed: int
    recipe: str
    fields: dict[str, Any]
    config: LinearizeConfig

    @property
    def stage_1(self) -> str | None:
        """The same text in runs whose stage 1 is the same; None if the run has none."""
        if not self.config.transfer.enabled or self.config.adjust.softmax_control:
            return None
        return json.dumps(config_fingerprint(self.config, "transfer"), sort_keys=True)


def read_sweep(
    file: str | Path,
    *,
    model: str | None = None,
    data: list[dict[str, Any]] | None = None,
    paths: dict[str, str] | None = None,
    overrides: Iterable[str] = (),
    seeds: list[int] | None = None,
    evaluate: Evaluate | None = None,
) -> tuple[Sweep, list[SweepRun]]:
    """A sweep file's runs, in the order of its axes, all validated.

    Later wins: recipe, `set`, the run's labels, model, data, overrides, seed.

    Args:
        model, data, seeds, evaluate: replace the recipes' and the file's; data is refused where an axis is about it.
        paths: replaces paths of the file, by name.
        overrides: "section.key=value", for every run.

    Raises:
        UserError: with the run and the field that is wrong.
    """
    try:
        named = Sweep.model_validate(read_yaml(file))
        known = named.paths | (paths or {})
        if unknown := sorted(set(known) - set(named.paths)):
            raise UserError(f"--path {unknown[0]}: {file} names the paths {', '.join(named.paths) or '(none)'}")
        sweep = Sweep.model_validate(_filled(named.model_dump(by_alias=True), known, file))
    except ValidationError as error:
        raise UserError(f"{file}: {explain(error, Sweep)}") from error
    sweep.evaluate = evaluate or sweep.evaluate
    axes = {
        name: {_label(value): {name: value} for value in axis} if isinstance(axis, list) else axis
        for name, axis in sweep.axes.items()
    }
    if data is not None and any("data.sources" in fields for axis in axes.values() for fields in axis.values()):
        raise UserError(f"{file} compares data sets, so --data would replace what differs; use --path NAME=PATH")
    changes = {name: value for name, value in {"model.path": model, "data.sources": data}.items() if value is not None}
    changes |= dict(map(parse_override, overrides))
    runs: list[SweepRun] = []
    for labels in itertools.product(*(axis.items() for axis in axes.values())):
        case = {axis: label for axis, (label, _) in zip(axes, labels, strict=True)}
        if any(left.items() <= case.items() for left in sweep.skip):
            continue
        fields = dict(sweep.overrides)
        for _, chosen in labels:
            fields |= chosen
        recipe = fields.pop("recipe", sweep.recipe)
        # A bare value says of which field it is.
        bare = {axis: f"{axis.split('.')[-1]}_" for axis in case if isinstance(sweep.axes[axis], list)}
        slugs = [_plain(bare.get(axis, "") + label) for axis, label in case.items()]
        for seed in sweep.seeds if seeds is None else seeds:
            name = "-".join([*slugs, f"seed{seed}"])
            wanted = fields | changes | {"seed": seed}
            runs.append(SweepRun(name, case, seed, recipe, wanted, _config(recipe, wanted, f"{file}, run {name}")))
    names = [run.name for run in runs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{file}: two runs would be called {twice[0]}; give their labels or seeds different names")
    if not runs:
        raise UserError(f"{file}: no run is left; check axes, skip and seeds")
    return sweep, runs


def commands(sweep: Sweep, run: SweepRun, folder: Path, transfer_from: str | None = None) -> list[list[str]]:
    """The words of the commands that do a run: linearize, then what is measured on its model.

    Args:
        folder: of the sweep.
        transfer_from: name of a run with the same stage 1, from which to take it.
    """
    output = folder / run.name
    sets = [word for field, value in run.fields.items() for word in ("--set", f"{field}={_text(value)}")]
    linearize = ["linearize", "--recipe", run.recipe, *sets, "-o", str(output), "--resume"]
    if transfer_from is not None:
        linearize += ["--transfer-from", str(folder / transfer_from)]
    found = [linearize]
    where = {"device": run.config.model.device, "dtype": run.config.model.dtype}
    for name, source in sweep.held_out.items():
        values = source.model_dump(mode="json", exclude_defaults=True)
        options = {
            "data": ",".join([str(values.pop("path")), *(f"{key}={value}" for key, value in values.items())]),
            "sequence_length": sweep.held_out_length or run.config.data.sequence_length,
            "loss_on": run.config.data.loss_on,
            "max_sequences": sweep.held_out_sequences,
            "batch_size": run.config.adjust.micro_batch_size,
            "output": held_out_file(output, name),
        }
        found.append(["perplexity", str(output), *_options(options | where)])
    if sweep.evaluate is not None:
        options = sweep.evaluate.model_dump() | {"output": output / EVALUATION_FILE}
        options["lengths"] = ",".join(map(str, sweep.evaluate.lengths))
        found.append(["eval", str(output), *_options(options | where)])
    return [["lolcats", *words] for words in found]


def held_out_file(output: Path, name: str) -> Path:
    return output / f"perplexity_{_plain(name)}.json"


def _options(values: dict[str, Any]) -> list[str]:
    given = {name: value for name, value in values.items() if value is not None}
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _config(recipe: str, fields: dict[str, Any], where: str) -> LinearizeConfig:
    try:
        config = LinearizeConfig.from_dict(set_fields(load_recipe(recipe), fields))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if config.model.path is None or not config.data.sources:
        raise UserError(f"{where}: no model or no data; give --model and --data, or a recipe that has them")
    return config


def _filled(value: Any, paths: dict[str, str | None], file: str | Path) -> Any:
    """The value with every "{name}" of `paths` replaced."""
    if isinstance(value, dict):
        return {key: _filled(item, paths, file) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, paths, file) for item in value]
    if not isinstance(value, str):
        return value
    for name in set(re.findall(r"\{(\w+)\}", value)) & set(paths):
        path = paths[name]
        if path is None:
            raise UserError(f"{file} needs the path of {name!r}: give --path {name}=FILE")
        value = value.replace(f"{{{name}}}", path)
    return value


def _text(value: Any) -> str:
    """The value as YAML on one line, for --set."""
    return value if isinstance(value, str) and yaml.safe_load(value) == value else json.dumps(value)


def _label(value: Any) -> str:
    if isinstance(value, list):
        return "".join(map(str, value)) if all(len(str(item)) == 1 for item in value) else "+".join(map(str, value))
    return "none" if value is None else str(value)


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("_") or "_"
