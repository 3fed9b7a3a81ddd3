"""Options of several commands, generated from the configuration where they set its fields."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
import yaml

from lolcats.cli.console import quiet_loading_bars
from lolcats.config import (
    AttentionConfig,
    DataSection,
    DataSource,
    GatesSection,
    LinearizeConfig,
    Section,
    parse_override,
    read_yaml,
    set_fields,
)
from lolcats.config.sections import SHORTEST_TEXT
from lolcats.errors import UserError
from lolcats.recipes import DEFAULT, SUFFIXES, load_recipe

# Option -> the fields that it sets; all other fields are reached with --set.
CONFIG_OPTIONS: dict[str, tuple[str, ...]] = {
    "device": ("model.device",),
    "dtype": ("model.dtype",),
    "window_size": ("attention.window_size",),
    "sinks": ("attention.sinks",),
    "linear_length_cap": ("attention.linear_length_cap",),
    "exact": ("attention.exact",),
    "exact_window": ("attention.exact_window",),
    "cache_bits": ("attention.cache_bits",),
    "sequence_length": ("data.sequence_length",),
    "max_tokens": ("data.max_train_tokens",),
    "loss_on": ("data.loss_on",),
    "begin_token": ("data.begin_token",),
    "epochs": ("transfer.epochs", "adjust.epochs"),
    "max_steps": ("transfer.max_steps", "adjust.max_steps"),
    "batch_size": ("transfer.batch_size", "adjust.batch_size"),
    "micro_batch_size": ("transfer.micro_batch_size", "adjust.micro_batch_size"),
    "block_layers": ("transfer.block_layers",),
    "block_mode": ("transfer.block_mode",),
    "transfer": ("transfer.enabled",),
    "adjust": ("adjust.enabled",),
    "track": ("output.track",),
    "seed": ("seed",),
}
MODEL_OPTIONS = (
    *("device", "dtype"),
    *(setting.name for setting in fields(AttentionConfig) if setting.metadata.get("adjustable")),
)
"""Options of commands that load a model: where and how, and what can be changed of its attention."""
DATA_OPTIONS = ("sequence_length", "loss_on", "begin_token")
_HELP = {
    "transfer": "Stage 1, attention transfer.",
    "adjust": "Stage 2, low-rank adjusting.",
    "seed": "Seed.",
    "sequence_length": "Tokens of a packed sequence, in both stages; the gates' texts have at most so many (but 512).",
    "epochs": "Passes of both stages over the training sequences; in place of a recipe's max_steps.",
    "max_steps": "Optimizer updates of both stages, and at most as many of the gates.",
    "batch_size": "Sequences per optimizer update of both stages.",
    "micro_batch_size": "Sequences per forward pass, at most so many with gates; gradients accumulate to batch_size.",
    "begin_token": "Packed sequences begin with the begin token, or not. Measuring without either, they do as the model"
    " was trained (data.begin_token), or as the tokenizer of any other model begins a text.",
}
_METAVARS = {"exact": "HEADS", "exact_window": "<int>|BYTES|null", "cache_bits": "8|null"}
_METAVARS["linear_length_cap"] = "<int>|auto"
_PANELS = {"transfer": "Training", "adjust": "Training", "output": "Run", "seed": "Run"}

Sources = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="PATH[,KEY=VALUE]...",
        help="Hub id, local json(l), csv, tsv, parquet or txt (.gz), `demo`, or `self`: what the model writes."
        f" Repeatable. Keys: {', '.join(list(DataSource.model_fields)[1:])}.",
    ),
]
Model = Annotated[str | None, typer.Argument(help="Hub id or folder; optional if the recipe names one.")]
Recipe = Annotated[str | None, typer.Option("--recipe", "-r", help="A recipe's name (`lolcats recipes`) or YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set any field; repeatable, wins.")
]


ModelLoader = functools.partial[tuple[Any, Any]]
"""Loads a model and its tokenizer from a path as a command's options say, which it has as keywords."""


def _load(path: str | Path, **given: Any) -> tuple[Any, Any]:
    from lolcats.evaluation.load import load_model

    quiet_loading_bars()
    return load_model(path, **given)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces a command's argument `load: ModelLoader` by `MODEL_OPTIONS`."""
    return _with_options(command, "load", map(_config_option, MODEL_OPTIONS), lambda given: ModelLoader(_load, **given))


def config_options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces a command's argument `given: dict` by options of `CONFIG_OPTIONS` (all, if none is named); the
    dictionary has those that were given."""
    options = [_config_option(name) for name in names or CONFIG_OPTIONS]
    return lambda command: _with_options(command, "given", options, dict)


def settings_options(section: type[Section], *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces a command's argument `settings: dict` by options of a section's fields; likewise those given."""
    options = []
    for name in names:
        field = section.model_fields[name]
        default = str(field.default) if field.default and isinstance(field.default, str | int | float) else None
        options.append(_option(name, field.annotation, field.description or "", show_default=default))
    return lambda command: _with_options(command, "settings", options, dict)


def resolve(
    given: dict[str, Any],
    *,
    model: str | None = None,
    data: Iterable[str] | None = None,
    recipe: str | None = None,
    overrides: Iterable[str] | None = None,
    saved: Path | None = None,
) -> LinearizeConfig:
    """A saved configuration or a recipe (neither: the default one), under options, under --set; validated once.

    Args:
        given: values by option of `CONFIG_OPTIONS`, and by field, such as `model.path`.
        data: as --data has it.
        saved: `run/config.yaml` of the run to resume.
    """
    if recipe is None and saved is not None:
        values = read_yaml(saved)
    else:
        recipe = recipe or DEFAULT
        values = load_recipe(recipe)
        values.setdefault("recipe", recipe)
    if model is not None:
        given["model.path"] = model
    if data:
        given["data.sources"] = [parse_source(text) for text in data]
    config = LinearizeConfig.from_dict(with_given(values, given, overrides or ()))
    if config.model.path is None:
        raise UserError(
            "no model: give a hub id or a folder, as in `lolcats linearize HuggingFaceTB/SmolLM2-135M-Instruct`,"
            " or a recipe that names one (`lolcats recipes`)"
        )
    if not config.data.sources:
        raise UserError("no data: give --data, for example --data yahma/alpaca-cleaned or --data records.jsonl")
    return config


def resolve_for_model(
    given: dict[str, Any], *, recipe: str | None, known: Container[str] = (), **others: Any
) -> LinearizeConfig:
    """As `resolve`; sequences of a shipped recipe are no longer than the positions that the model has.

    Args:
        known: models that are not looked at; nor is one that cannot be found, of which loading says more.
    """
    config = resolve(given, recipe=recipe, **others)
    if "sequence_length" in given or str(recipe).endswith(SUFFIXES) or config.model.path in known:
        return config
    from lolcats.conversion import positions_of
    from lolcats.modeling.loading import locate

    try:
        positions = positions_of(locate(config.model))
    except UserError:
        return config
    fits = positions >= config.data.sequence_length
    return config if fits else resolve(given | {"sequence_length": positions}, recipe=recipe, **others)


def with_given(values: dict[str, Any], given: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`values` of a configuration with options and --set laid over them."""
    fields = {field: value for option, value in given.items() for field in CONFIG_OPTIONS.get(option, (option,))}
    return set_fields(values, fields | _following(values, fields) | dict(map(parse_override, overrides)))


def _following(values: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """What options for both stages also set: a stage's own data where it has the field, and limits of the gates."""
    found = {
        f"{stage}.{field}": value
        for stage in ("transfer", "adjust")
        for field, value in fields.items()
        if field != "data.sources" and field in {f"data.{key}" for key in (values.get(stage) or {}).get("data") or {}}
    }
    gates = GatesSection().model_dump() | (values.get("gates") or {})
    if (steps := fields.get("transfer.max_steps")) is not None:
        found["gates.max_steps"] = min(steps, gates["max_steps"] or steps)
    if (length := fields.get("data.sequence_length")) is not None:
        found["gates.sequence_length"] = max(SHORTEST_TEXT, min(length, gates["sequence_length"]))
    if (size := fields.get("transfer.micro_batch_size")) is not None:
        found["gates.micro_batch_size"] = math.gcd(size, gates["batch_size"])
    return found


def data_section(sources: Iterable[str] | None, given: dict[str, Any], **fields: Any) -> DataSection:
    """A validated data section from --data, options and other fields; None leaves a field's default."""
    values = {f"data.{name}": value for name, value in fields.items() if value is not None}
    values["data.sources"] = [parse_source(text) for text in sources or []]
    return LinearizeConfig.from_dict(with_given({}, values | given, ())).data


_SOURCE_KEYS = [name for name in DataSource.model_fields if name != "path"]
_SOURCE_OPTION = re.compile(rf",({'|'.join(_SOURCE_KEYS)})=([^,]*)$")


def parse_source(text: str) -> dict[str, Any]:
    """`PATH[,key=value]...` -> fields of a `DataSource`.

    >>> parse_source("books.jsonl,weight=2,text_column=body")
    {'path': 'books.jsonl', 'weight': '2', 'text_column': 'body'}
    """
    path, options = text, []
    while match := _SOURCE_OPTION.search(path):
        options.append((match[1], match[2]))
        path = path[: match.start()]
    if not path:
        raise UserError(f"--data {text!r}: expected PATH[,key=value]..., for example records.jsonl,weight=2")
    unknown = re.search(r",(\w+)=", path)
    if unknown and not Path(path).exists():
        known = ", ".join(_SOURCE_KEYS)
        raise UserError(f"--data {text!r}: {unknown[1]!r} is not an option of a data source; known: {known}")
    return {"path": path, **dict(reversed(options))}


def _with_options(
    command: Callable[..., Any],
    argument: str,
    options: Iterable[inspect.Parameter],
    collect: Callable[[dict[str, Any]], Any],
) -> Callable[..., Any]:
    """A command with options in the place of an argument, which gets what `collect` makes of those given."""
    options = list(options)
    signature = inspect.signature(command, eval_str=True)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != argument]

    @functools.wraps(command)
    def run(**arguments: Any) -> Any:
        texts = {option.name: arguments.pop(option.name) for option in options}
        given = {name: text for name, text in texts.items() if text not in (None, [])}
        if "exact" in given:
            given["exact"] = ",".join(given["exact"])
        for name in (_METAVARS.keys() & given.keys()) - {"exact"}:
            with suppress(yaml.YAMLError):
                given[name] = yaml.safe_load(given[name])  # a number, a word, or null
        return command(**arguments, **{argument: collect(given)})

    parameters = [*kept, *options]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _config_option(name: str) -> inspect.Parameter:
    section, _, key = CONFIG_OPTIONS[name][0].rpartition(".")
    kind: Any = LinearizeConfig.model_fields[section].annotation if section else LinearizeConfig
    panel = _PANELS.get(section or key, section.capitalize())
    if is_dataclass(kind):
        meaning = next(setting.metadata["help"] for setting in fields(kind) if setting.name == key)
        return _option(name, get_type_hints(kind)[key], _HELP.get(name, meaning), rich_help_panel=panel)
    field = kind.model_fields[key]
    return _option(name, field.annotation, _HELP.get(name, field.description or ""), rich_help_panel=panel)


def _option(name: str, kind: Any, meaning: str, **details: Any) -> inspect.Parameter:
    """The option as typer takes it: None where it is not given. Choices and limits are checked with all values."""
    flag = "--" + name.replace("_", "-")
    alternatives = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    kinds = [part for part in alternatives if part is not type(None)]
    taken: Any = list[str] if name == "exact" else str
    if name in _METAVARS:
        details["metavar"] = _METAVARS[name]
    elif kinds == [bool]:
        taken = bool
        flag += "" if name == "run_code" else f"/--no-{flag[2:]}"
    elif get_origin(kinds[0]) is Literal:
        details["metavar"] = "|".join(map(str, get_args(kinds[0])))
    elif len(kinds) == 1 and kinds[0] in (int, float, list[str]):
        taken = kinds[0]
    option = typer.Option(flag, help=" ".join(meaning.split()).replace("`", ""), **details)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[taken | None, option]
    )
