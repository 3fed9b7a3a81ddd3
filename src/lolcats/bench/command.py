"""One command line for `lolcats bench NAME` and benchmarks/NAME.py: an option for each field of what is measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from lolcats.analysis.files import write_text
from lolcats.config.attention import AttentionConfig
from lolcats.errors import UserError


def parser(defaults: Any, description: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """An option for each field of the dataclass `defaults`, and for each attention setting; lists have commas."""
    made = argparse.ArgumentParser(prog, None, description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for item in fields(defaults):
        default = getattr(defaults, item.name)
        if is_dataclass(default):
            group = made.add_argument_group(f"{item.name} settings (`AttentionConfig`)")
            for setting in fields(AttentionConfig):
                shown = getattr(default, setting.name)
                kind = {"type": yaml.safe_load, "default": shown, "metavar": "VALUE"}
                group.add_argument(_option(setting.name), **kind, help=f"default: {_text(shown)}")
        elif isinstance(default, bool):
            made.add_argument(_option(item.name), action=argparse.BooleanOptionalAction, default=default)
        elif isinstance(default, tuple):
            made.add_argument(_option(item.name), type=_list_like(item.name, default), default=default, metavar="A,B",
                              help=f"default: {_text(default)}")  # fmt: skip
        else:
            made.add_argument(_option(item.name), type=type(default), default=default, help=f"default: {default}")
    made.add_argument("--json", type=Path, help="write everything measured to this file, anew after every row")
    return made


def settings(defaults: Any, given: argparse.Namespace) -> Any:
    """What the options say, as an object of the type of `defaults`."""
    values = {}
    for item in fields(defaults):
        if is_dataclass(getattr(defaults, item.name)):
            try:
                chosen = AttentionConfig(**{one.name: getattr(given, one.name) for one in fields(AttentionConfig)})
            except ValueError as error:
                raise UserError(str(error)) from error
            values[item.name] = chosen
        else:
            values[item.name] = getattr(given, item.name)
    return type(defaults)(**values)


def measure(benchmark: Any, defaults: Any, argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Run a benchmark's module by its command line: progress on stderr, tables on stdout, and the file.

    Raises:
        UserError: settings that it refuses, or a file that cannot be written.
    """
    made = parser(defaults, benchmark.__doc__, prog)
    made.add_argument("--profile", action="store_true", help="instead: milliseconds of every kernel of a step")
    given = made.parse_args(argv)
    bench, console = settings(defaults, given), Console(width=200)
    progress = Console(stderr=True, width=200)
    if given.profile:
        for title, times in benchmark.profiles(bench, progress):
            console.print(title, highlight=False)
            for name, milliseconds in times.items():
                console.print(f"  {milliseconds:9.4f} ms  {name[:140]}", highlight=False, markup=False)
        return
    report = benchmark.run(bench, progress, saver(given.json))
    benchmark.print_table(report, console)


def saver(file: Path | None) -> Callable[[dict[str, Any]], None]:
    """What writes a report whole or not at all; a UserError if it cannot be written."""
    if file is None:
        return lambda report: None
    return lambda report: write_text(file, json.dumps(report, indent=1) + "\n")


def settings_json(bench: Any) -> dict[str, Any]:
    return dict(json.loads(json.dumps(asdict(bench))))


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join("x".join(map(str, entry)) if isinstance(entry, tuple) else str(entry) for entry in value)
    return str(value)


def _list_like(name: str, default: tuple[Any, ...]) -> Callable[[str], tuple[Any, ...]]:
    def read(text: str) -> tuple[Any, ...]:
        kind = type(default[0])
        try:
            if kind is tuple:
                return tuple(_pair(part) for part in text.split(","))
            return tuple(kind(part.strip()) for part in text.split(","))
        except ValueError:
            example = _text(default[:2])
            raise UserError(f"{_option(name)}: expected values such as {example}, got {text!r}") from None

    return read


def _pair(text: str) -> tuple[int, int]:
    batch, tokens = (int(part) for part in text.split("x"))
    if min(batch, tokens) < 1:
        raise ValueError
    return batch, tokens
