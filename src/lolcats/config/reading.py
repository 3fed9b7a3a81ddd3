"""Configurations as YAML, changes laid over them, and errors that say which field is wrong."""

from __future__ import annotations

import dataclasses
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from lolcats.config.sections import Section
from lolcats.errors import UserError

Read = TypeVar("Read", bound=BaseModel)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping; errors name the file."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping of sections, got {type(values).__name__}")
    return values


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, section by section; a stage's `epochs` replace its `max_steps`."""
    merged = dict(base)
    if "epochs" in changes:
        merged.pop("max_steps", None)
    for key, value in changes.items():
        both_sections = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both_sections else value
    return merged


def set_fields(values: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """`values` of a configuration with fields such as `{"transfer.lr": 0.005}` laid over them, in their order."""
    for field in fields:
        stage, _, key = field.rpartition(".")
        if key == "epochs" and fields.get(f"{stage}.max_steps") is not None:
            raise UserError(f"{stage}.epochs and {stage}.max_steps both say how long it trains: give one of them")
    for field, value in fields.items():
        for key in reversed(field.split(".")):
            value = {key: value}
        values = merge(values, value)
    return values


def parse_override(text: str) -> tuple[str, Any]:
    """`"transfer.lr=0.005"` -> `("transfer.lr", 0.005)`; the value is YAML."""
    field, equals, value = text.partition("=")
    if not equals or not field.strip():
        raise UserError(f"--set {text}: expected section.key=value, for example transfer.lr=0.005")
    try:
        return field.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"--set {text}: the value is not valid YAML: {error}") from error


def validated(section: type[Read], values: dict[str, Any]) -> Read:
    """A section of these values."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise UserError(explain(error, section)) from error


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """The message for the user: each wrong field, what is wrong, what it got, and a misspelt one's neighbours."""
    lines = []
    for item in error.errors():
        where, got = ".".join(map(str, item["loc"])) or "config", item["input"]
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            lines.append(f"  {where}: there is no such field; {_suggestion(where, field_names(root))}")
        else:
            shown = "" if isinstance(got, dict | Section) else f" (got {got!r})"
            lines.append(f"  {where}: {item['msg'].removeprefix('Value error, ')}{shown}")
    return "the configuration is not valid:\n" + "\n".join(lines)


def field_names(section: Any, prefix: str = "") -> list[str]:
    """All fields of a section and of those in it, written `section.key`."""
    fields: dict[str, Any] = {}
    if isinstance(section, type) and issubclass(section, Section):
        fields = {name: field.annotation for name, field in section.model_fields.items()}
    elif dataclasses.is_dataclass(section):
        fields = {field.name: field.type for field in dataclasses.fields(section)}
    names = []
    for name, kind in fields.items():
        inner = get_args(kind)[0] if get_origin(kind) is list else kind
        names += [prefix + name, *field_names(inner, f"{prefix}{name}.")]
    return names


def _suggestion(wrong: str, names: list[str]) -> str:
    """Fields with a similar name in the same section, else those of that name in others, else all of the section."""
    *parts, key = (part for part in wrong.split(".") if not part.isdigit())
    prefix = ".".join([*parts, ""])
    siblings = [name.removeprefix(prefix) for name in names if name.rpartition(".")[0] == prefix[:-1]]
    near = [prefix + name for name in get_close_matches(key, siblings, n=2)]
    near = near or [name for name in names if name.rpartition(".")[2] == key]
    return f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(siblings)}"
