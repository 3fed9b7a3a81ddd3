"""Configurations as YAML, changes laid over them, and errors that say which field is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lolcats.config.section import Section
from lolcats.errors import UserError


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping; errors name the file."""
    try:
        values = yaml.safe_load(Path(path).read_text())
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
    """`base` with `changes` laid over it, section by section."""
    merged = dict(base)
    for key, value in changes.items():
        both_sections = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both_sections else value
    return merged


def parse_override(text: str) -> dict[str, Any]:
    """`"transfer.lr=0.005"` -> `{"transfer": {"lr": 0.005}}`; the value is YAML."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise UserError(f"--set {text}: expected section.key=value, for example transfer.lr=0.005")
    try:
        nested: Any = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"--set {text}: the value is not valid YAML: {error}") from error
    for key in reversed(path.strip().split(".")):
        nested = {key: nested}
    return nested


def explain(error: ValidationError) -> str:
    """The message for the user: each wrong field, what is wrong with it and what it got."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "config"
        got = item["input"]
        shown = "" if isinstance(got, dict | Section) else f" (got {got!r})"
        lines.append(f"  {where}: {item['msg']}{shown}")
    return "the configuration is not valid:\n" + "\n".join(lines)
