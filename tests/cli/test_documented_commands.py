"""Every `lolcats` command that README and the documentation show is one that the program takes."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lolcats.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM = typer.main.get_command(app)


def commands(text: str) -> list[str]:
    """Those in blocks of code, and those between backticks that have an option."""
    text = text.replace("\\\n", " ")
    fenced = "\n".join(text.split("```")[1::2])
    indented = "\n".join(re.findall(r"^    (.*)", text, re.MULTILINE))
    blocks = re.findall(r"^(?:\$ )?(lolcats [^|\n]*)", f"{fenced}\n{indented}", re.MULTILINE)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_taken(page):
    text = page.read_text(encoding="utf-8")
    for line in commands(text):
        try:
            parse(line)
        except Exception as error:
            if "Missing parameter" in str(error) and f"`{line}" in text:  # an option is shown, not a whole command
                continue
            pytest.fail(f"{page.name}: {line}: {error}")
