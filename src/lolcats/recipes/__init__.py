"""Recipes: complete configurations as commented YAML, one per model and goal, and one for any model.

The first line of every file is a comment that describes it in one sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lolcats.config import read_yaml
from lolcats.errors import UserError

FOLDER = Path(__file__).parent
DEFAULT = "lolcats-plus"  # where no recipe is named


def list_recipes() -> dict[str, str]:
    """Name -> one-line description, in alphabetical order."""
    return {path.stem: _description(path) for path in sorted(FOLDER.glob("*.yaml"), key=lambda path: path.stem)}


def recipe_path(name: str) -> Path:
    """File of the recipe `name`.

    Raises:
        UserError: there is none of this name; lists those there are.
    """
    path = FOLDER / f"{name}.yaml"
    if name not in list_recipes():
        raise UserError(
            f"no recipe named {name!r}; there are {', '.join(list_recipes())}. A file of your own must end in"
            " .yaml or .yml"
        )
    return path


def load_recipe(name_or_path: str | Path) -> dict[str, Any]:
    """Values of a recipe by name, or of a YAML file, as for `LinearizeConfig.from_dict`.

    Raises:
        UserError: unknown name, unreadable file, or not a mapping.
    """
    text = str(name_or_path)
    if text.endswith((".yaml", ".yml")):
        return read_yaml(text)
    return {"recipe": text, **read_yaml(recipe_path(text))}


def _description(path: Path) -> str:
    with path.open(encoding="utf-8") as stream:
        return stream.readline().lstrip("# ").strip()
