"""Sweep files that come with the package: the paper's ablations on a model of 135 million parameters.

The first line of every file is a comment that describes it in one sentence.
"""

from __future__ import annotations

from pathlib import Path

from lolcats.errors import UserError

FOLDER = Path(__file__).parent


def list_sweeps() -> dict[str, str]:
    """Name -> one-line description, in alphabetical order."""
    files = sorted(FOLDER.glob("*.yaml"), key=lambda path: path.stem)
    return {path.stem: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for path in files}


def sweep_path(name_or_path: str | Path) -> Path:
    """A sweep file by its name, or the file itself.

    Raises:
        UserError: there is none of this name; lists those there are.
    """
    text = str(name_or_path)
    if text.endswith((".yaml", ".yml")):
        return Path(text).expanduser()
    if text not in list_sweeps():
        raise UserError(
            f"no sweep named {text!r}; there are {', '.join(list_sweeps())}. A file of your own must end in .yaml or"
            " .yml"
        )
    return FOLDER / f"{text}.yaml"
