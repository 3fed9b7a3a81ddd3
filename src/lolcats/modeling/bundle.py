"""The two source files that let a folder load without this package (`trust_remote_code=True`).

`configuration_lolcats.py` and `modeling_lolcats.py` are this package's own modules, one after another in the order of
their imports; there is no second implementation. Kernels stay behind: what the plain modules ask of them is answered
by a function that says so once.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
from collections.abc import Collection
from functools import cache
from importlib import import_module
from pathlib import Path

PACKAGE = __name__.partition(".")[0]
AUTO_MAP = {
    "AutoConfig": "configuration_lolcats.LolcatsConfig",
    "AutoModel": "modeling_lolcats.LolcatsModel",
    "AutoModelForCausalLM": "modeling_lolcats.LolcatsForCausalLM",
    "AutoModelForSequenceClassification": "modeling_lolcats.LolcatsForSequenceClassification",
}
LEFT_OUT = (f"{PACKAGE}.ops.hybrid_attention.kernels", f"{PACKAGE}.modeling.bundle")

_HEADER = '''"""{title}

Written by lolcats from its own modules; `pip install lolcats` brings the GPU kernels.
"""

from __future__ import annotations

{imports}


'''
_STUB = '''def _no_kernels(*args, **kwargs) -> str:
    """Stands for every question whether a kernel takes a call."""
    from transformers.utils import logging

    logging.get_logger(__name__).warning_once("running without GPU kernels, which lolcats brings")
    return "This file has no kernels: pip install lolcats."


'''


def write_bundle(folder: Path) -> None:
    """Write the two files into an exported `folder` and name them in its config.json.

    Raises:
        OSError: `folder` has no config.json or cannot be written.
        ValueError: the package's modules cannot be joined, see `join`.
    """
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text()) | {"auto_map": AUTO_MAP}
    for name, source in _files().items():
        (folder / name).write_text(source, encoding="utf-8")
    unfinished = config_file.with_suffix(".json.tmp")
    unfinished.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    os.replace(unfinished, config_file)


@cache
def _files() -> dict[str, str]:
    first = _closure(f"{PACKAGE}.modeling.configuration", {})
    both = _closure(f"{PACKAGE}.modeling.model", dict(first))
    second = {name: source for name, source in both.items() if name not in first}
    offered = {name for source in first.values() for name in _defined(ast.parse(source))}
    return {
        "configuration_lolcats.py": join(first, "The configuration of a linearized model."),
        "modeling_lolcats.py": join(second, "A linearized model in plain PyTorch.", offered, "configuration_lolcats"),
    }


def _closure(module: str, found: dict[str, str]) -> dict[str, str]:
    """`found`, and the source of a module and of all of this package's modules that it imports, those first."""
    source = inspect.getsource(import_module(module))
    for imported in map(_origin, ast.walk(ast.parse(source))):
        if imported.startswith(f"{PACKAGE}.") and imported not in found and not _left_out(imported):
            _closure(imported, found)
    found.setdefault(module, source)
    return found


def join(sources: dict[str, str], title: str, offered: Collection[str] = (), offers: str = "") -> str:
    """One module with the content of several.

    Args:
        sources: module name -> source, each after those that it imports.
        offered: names that the file `offers` beside this one defines.

    Private names that two modules define are renamed in the second.

    Raises:
        ValueError: two modules define one public (or one imported private) name, one defines what another imports from
            elsewhere, or an import cannot be resolved.
    """
    owners: dict[str, str] = {}
    wanted: set[str] = set()
    imports: dict[str, dict[str, str]] = {}  # module -> name there, with "as" -> name here
    parts = []
    for module, source in sources.items():
        tree, lines, aliases = ast.parse(source), source.splitlines(), []
        for node in tree.body:
            if not isinstance(node, ast.Import | ast.ImportFrom) and not _is_omitted(node):
                continue
            lines[node.lineno - 1 : node.end_lineno] = [""] * len(lines[node.lineno - 1 : node.end_lineno])
            origin = _origin(node)
            for alias in getattr(node, "names", ()):
                name = alias.asname or alias.name
                if _left_out(origin):
                    aliases.append(f"{name} = _no_kernels")
                elif not origin.startswith(f"{PACKAGE}.") and origin != "__future__":
                    imports.setdefault(origin, {})[ast.unparse(alias)] = name
                elif alias.name in offered:
                    imports.setdefault(f".{offers}", {})[ast.unparse(alias)] = name
                elif origin != "__future__":
                    wanted.add(alias.name)
                    aliases += [f"{name} = {alias.name}"] * (name != alias.name)
        text = re.sub(
            r"^( +)from lolcats.* import .*$",
            r'\1raise ImportError("pip install lolcats")',
            "\n".join(lines),
            flags=re.M,
        )
        for name in _defined(tree):
            new = name
            if name in owners and (not name.startswith("_") or f"import {name}" in "".join(sources.values())):
                raise ValueError(f"{module} and {owners[name]} both define {name}; rename one of them")
            if name in owners:
                new = f"_{module.rpartition('.')[2]}{name}"
                text = re.sub(rf"(?<![.\w]){name}\b", new, text)
            owners[new] = module
        parts.append("\n".join([f"# --- {module} ---\n", *aliases, text.strip()]))
    if clashes := owners.keys() & {name for names in imports.values() for name in names.values()}:
        raise ValueError(f"{owners[min(clashes)]} defines {min(clashes)}, which another module imports from elsewhere")
    if unknown := wanted - owners.keys():
        raise ValueError(f"{min(unknown)} is imported and defined nowhere")
    head = [f"import {name}" for name in sorted(imports.pop("", {}))]
    head += [f"from {origin} import {', '.join(sorted(names))}" for origin, names in sorted(imports.items())]
    body = "\n\n\n".join(parts)
    return _HEADER.format(title=title, imports="\n".join(head)) + (_STUB if "_no_kernels" in body else "") + body + "\n"


def _origin(node: ast.AST) -> str:
    """The module that something is imported from, else ""."""
    return (node.module or "") if isinstance(node, ast.ImportFrom) else ""


def _left_out(module: str) -> bool:
    return module.startswith(LEFT_OUT)


def _is_omitted(node: ast.stmt) -> bool:
    """Whether a statement at the top level is a docstring or `__all__`."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) == "__all__"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.lineno == 1


def _defined(tree: ast.Module) -> list[str]:
    """Names that a module's top level binds, imports left aside."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not _is_omitted(node):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return found
