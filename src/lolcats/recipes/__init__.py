"""Recipes: configurations as commented YAML, one per model and goal, and some for any model.

A recipe has `base: NAME`, a recipe or a file relative to its own, and what differs: mappings merge, lists replace. The
first line of every file is a comment that describes it in one sentence.
"""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from lolcats.config import merge, read_yaml
from lolcats.errors import UserError

FOLDER = Path(__file__).parent
DEFAULT = "lolcats-hybrid"  # where no recipe is named
SUFFIXES = (".yaml", ".yml")


def load_recipe(name_or_path: str | Path) -> dict[str, Any]:
    """Values of a recipe by name, or of a YAML file, laid over those of its base, for `LinearizeConfig.from_dict`."""
    chain = _chain(name_or_path)
    values: dict[str, Any] = {}
    for _, own in reversed(chain):
        values = merge(values, own)
    file = chain[0][0]
    return values if file.parent != FOLDER else {"recipe": file.stem, **values}


def show_recipe(name_or_path: str | Path) -> str:
    """A recipe as one YAML file without a base; its first line names the files it is made from."""
    chain = _chain(name_or_path)
    text = chain[0][0].read_text(encoding="utf-8")
    made_from = f"# {' over '.join(file.stem for file, _ in chain)}\n"
    if len(chain) == 1:
        return made_from + text
    values = load_recipe(name_or_path)
    values.pop("recipe", None)
    comment = "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    return made_from + comment + "\n" + yaml.safe_dump(json.loads(json.dumps(values)), sort_keys=False)


def _chain(name_or_path: str | Path) -> list[tuple[Path, dict[str, Any]]]:
    """A recipe's file and what it holds, then the same of its base, and so on."""
    file = find_file("recipe", FOLDER, name_or_path)
    chain: list[tuple[Path, dict[str, Any]]] = []
    while True:
        if any(path.resolve() == file.resolve() for path, _ in chain):
            cycle = " -> ".join(str(path) for path in [*(path for path, _ in chain), file])
            raise UserError(f"a recipe cannot be its own base: {cycle}")
        values = read_yaml(file)
        chain.append((file, values))
        if "base" not in values:
            return chain
        base = str(values.pop("base"))
        try:
            file = find_file(
                "recipe", FOLDER, file.parent / Path(base).expanduser() if base.endswith(SUFFIXES) else base
            )
        except UserError as error:
            raise UserError(f"{file}: base: {error}") from error


def list_recipes(folder: Path = FOLDER) -> dict[str, str]:
    """Name of each recipe, or other YAML file of a folder -> its first line, a comment, in alphabetical order."""
    files = sorted(folder.glob("*.yaml"), key=lambda path: path.stem)
    return {path.stem: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for path in files}


def find_file(kind: str, folder: Path, name_or_path: str | Path) -> Path:
    """A file of the package's folder by its name, or the YAML file itself."""
    text = str(name_or_path)
    if text.endswith(SUFFIXES):
        return Path(text).expanduser()
    known = list_recipes(folder)
    if text not in known:
        raise UserError(
            f"no {kind} named {text!r}; there are {', '.join(known)}. A file of your own must end in .yaml or .yml"
        )
    return folder / f"{text}.yaml"
