"""Recipes: complete configurations as commented YAML, one per model and goal, and one for any model.

The first line of every file is a comment that describes it in one sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lolcats.config import read_yaml
from lolcats.errors import UserError

FOLDER = Path(__file__).parent
DEFAULT = "lolcats-hybrid"  # where no recipe is named


def list_recipes() -> dict[str, str]:
    """Name -> one-line description, in alphabetical order."""
    return list_files(FOLDER)


def recipe_path(name_or_path: str | Path) -> Path:
    """`find_file` of a recipe."""
    return find_file("recipe", FOLDER, name_or_path)


def load_recipe(name_or_path: str | Path) -> dict[str, Any]:
    """Values of a recipe by name, or of a YAML file, as for `LinearizeConfig.from_dict`.

    Raises:
        UserError: unknown name, unreadable file, or not a mapping.
    """
    file = recipe_path(name_or_path)
    return read_yaml(file) if file.parent != FOLDER else {"recipe": file.stem, **read_yaml(file)}


def list_files(folder: Path) -> dict[str, str]:
    """Name of each YAML file -> its first line, a comment, in alphabetical order."""
    files = sorted(folder.glob("*.yaml"), key=lambda path: path.stem)
    return {path.stem: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for path in files}


def find_file(kind: str, folder: Path, name_or_path: str | Path) -> Path:
    """A file of the package's folder by its name, or the YAML file itself.

    Raises:
        UserError: there is none of this name; lists those there are.
    """
    text = str(name_or_path)
    if text.endswith((".yaml", ".yml")):
        return Path(text).expanduser()
    known = list_files(folder)
    if text not in known:
        raise UserError(
            f"no {kind} named {text!r}; there are {', '.join(known)}. A file of your own must end in .yaml or .yml"
        )
    return folder / f"{text}.yaml"
