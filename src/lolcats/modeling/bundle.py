"""The source files that a folder needs to load on a machine without this package (`trust_remote_code=True`).

transformers loads remote code from flat folders: the modules that the model imports are copied under flat
names, and `from lolcats.a.b import c` becomes `from .lolcats_a_b import c`.
"""

from __future__ import annotations

import ast
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

PACKAGE = __name__.partition(".")[0]
CONFIGURATION = f"{PACKAGE}.modeling.configuration"
MODEL = f"{PACKAGE}.modeling.model"
AUTO_MAP = {
    "AutoConfig": "configuration_lolcats.LolcatsConfig",
    "AutoModelForCausalLM": "modeling_lolcats.LolcatsForCausalLM",
}
_IMPORT = re.compile(rf"^(\s*)from ({PACKAGE}(?:\.\w+)*) import ", re.MULTILINE)


def write_bundle(folder: Path) -> list[Path]:
    """Write the model's source files into an exported `folder` and name them in its config.json.

    Returns:
        The files written.

    Raises:
        OSError: `folder` has no config.json or cannot be written.
        ValueError: a source file imports the package in a form that cannot be made relative.
    """
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    written = []
    for module, source in _closure([CONFIGURATION, MODEL]).items():
        file = folder / f"{_flat(module)}.py"
        file.write_text(_IMPORT.sub(lambda match: f"{match[1]}from .{_flat(match[2])} import ", source))
        written.append(file)
    config["auto_map"] = AUTO_MAP
    unfinished = config_file.with_suffix(".json.tmp")
    unfinished.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    os.replace(unfinished, config_file)
    return written


def _closure(modules: list[str]) -> dict[str, str]:
    """Source of the given modules and of all modules of this package that they import."""
    sources: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in sources:
            continue
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise ValueError(f"{module} has no source file")
        sources[module] = Path(spec.origin).read_text()
        waiting += _imports(module, sources[module])
    return sources


def _imports(module: str, source: str) -> list[str]:
    """Modules of this package imported in `source`, at any depth."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if _is_ours(alias.name)]
            if names:
                raise ValueError(f"{module}: write `from {names[0]} import name`, which can be made relative")
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if node.level or name == PACKAGE:
                raise ValueError(f"{module}, line {node.lineno}: import from the defining module by its full name")
            if _is_ours(name):
                found.append(name)
    return found


def _is_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(PACKAGE + ".")


def _flat(module: str) -> str:
    special = {CONFIGURATION: "configuration_lolcats", MODEL: "modeling_lolcats"}
    return special.get(module, module.replace(".", "_"))
