"""The command line: thin commands over a typed configuration."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `lolcats` program."""
    from lolcats.cli.app import app

    app()
