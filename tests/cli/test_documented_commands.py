"""Every command that README and the documentation show is one that `lolcats`, a script or `make` takes."""

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lolcats.cli.app import app

ROOT = Path(__file__).parents[2]
OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
PAGES = [*OTHERS, *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM = typer.main.get_command(app)


def commands(text: str) -> list[str]:
    """Those in blocks of code, and those between backticks that have an option."""
    text = text.replace("\\\n", " ")
    fenced = "\n".join(text.split("```")[1::2])
    indented = "\n".join(re.findall(r"^    (.*)", text, re.MULTILINE))
    blocks = re.findall(r"^(?:\S.* -m )?(lolcats [^|\n]*)", f"{fenced}\n{indented}", re.MULTILINE)
    inline = [" ".join(span.split()) for span in re.findall(r"`(lolcats [^`]*)`", text) if "--" in span]
    return [line for line in dict.fromkeys([*blocks, *inline]) if "..." not in line]


def parse(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    words = words[: words.index("&")] if "&" in words else words
    command: Any = PROGRAM
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command = command.commands[words.pop(0)]
    if "--help" in words or not words:
        return
    command.make_context(command.name, list(words))
    if command.name == "linearize" and "--resume" not in words:  # also what its settings are called
        result = CliRunner().invoke(app, ["linearize", *words, "--dry-run"])
        assert result.exit_code == 0 or "no model" in result.output or "no data" in result.output, result.output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_taken(page):
    text = page.read_text(encoding="utf-8")
    for line in commands(text):
        try:
            parse(line)
        except Exception as error:
            if "Missing parameter" in str(error) and f"`{line}" in text:  # an option is shown, not a whole command
                continue
            pytest.fail(f"{page.name}: {line}: {error}")


class Parsed(Exception):
    """The options are known and complete."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_scripts_targets_and_imports_exist(page, monkeypatch):
    def parse_only(parser, real=argparse.ArgumentParser.parse_args):
        real(parser)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    text, makefile = page.read_text(encoding="utf-8"), (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in re.findall(r"python (benchmarks/[^`\n]*)", text):
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(Parsed):
            runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
    for target in re.findall(r"(?:^    |`|\()make ([a-z-]+)", text, re.MULTILINE):
        assert f"\n{target}:" in makefile, target
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        compile(block, page.name, "exec")
        exec("\n".join(re.findall(r"^(?:from|import) .*", block, re.MULTILINE)), {})
