"""The two source files that let a folder load without this package (`trust_remote_code=True`).

`configuration_lolcats.py` and `modeling_lolcats.py` are this package's own modules, one after another in the order of
their imports; there is no second implementation. Kernels stay behind: what the plain modules ask of them is answered
by a function that says so once.
"""

from __future__ import annotations

import ast
import io
import json
import os
import tokenize
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGE = __name__.partition(".")[0]
CONFIGURATION = f"{PACKAGE}.modeling.configuration"
MODEL = f"{PACKAGE}.modeling.model"
AUTO_MAP = {
    "AutoConfig": "configuration_lolcats.LolcatsConfig",
    "AutoModelForCausalLM": "modeling_lolcats.LolcatsForCausalLM",
}
LEFT_OUT = (f"{PACKAGE}.ops.hybrid_attention.kernels", f"{PACKAGE}.modeling.bundle")

_HEADER = '''"""{title}

Written by lolcats from its own modules; `pip install lolcats` brings the GPU kernels.
"""

from __future__ import annotations

{imports}
'''
_NO_KERNELS = '''

def _no_kernels(*args: Any, **kwargs: Any) -> str:
    """Stands for every question whether a kernel takes a call."""
    logging.get_logger(__name__).warning_once("running without GPU kernels, which `pip install lolcats` brings")
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
        (folder / name).write_text(source)
    unfinished = config_file.with_suffix(".json.tmp")
    unfinished.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    os.replace(unfinished, config_file)


@cache
def _files() -> dict[str, str]:
    configuration = _closure(CONFIGURATION)
    model = {name: source for name, source in _closure(MODEL).items() if name not in configuration}
    first = join(configuration, "The configuration of a linearized model.")
    offered = {name for source in configuration.values() for name in _defined(ast.parse(source))}
    second = join(model, "A linearized model in plain PyTorch.", offered, "configuration_lolcats")
    return {"configuration_lolcats.py": first, "modeling_lolcats.py": second}


@dataclass
class _Imports:
    """What the joined modules import from elsewhere."""

    modules: set[str] = field(default_factory=set)
    names: dict[str, set[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"import {name}" for name in sorted(self.modules)]
        for name, imported in sorted(self.names.items()):
            lines.append(f"from {name} import {', '.join(sorted(imported))}")
        return "\n".join(lines)


def join(sources: dict[str, str], title: str, offered: set[str] | None = None, offers: str = "") -> str:
    """One module with the content of several.

    Args:
        sources: module name -> source, each after those that it imports.
        offered: names that the file `offers` beside this one defines.

    Private names that two modules define are renamed in the second.

    Raises:
        ValueError: two modules define one public (or one imported private) name, an import cannot be resolved, or
            has another form than `from lolcats.module import name`.
    """
    imports = _Imports()
    owners: dict[str, str] = {}
    used: set[str] = set()
    trees = {name: ast.parse(source) for name, source in sources.items()}
    parts = []
    for module, source in sources.items():
        renamed = {}
        for name in _defined(trees[module]):
            if name in owners and (not name.startswith("_") or f"import {name}" in "".join(sources.values())):
                raise ValueError(f"{module} and {owners[name]} both define {name}; rename one of them")
            if name in owners:
                renamed[name] = f"_{module.rpartition('.')[2]}{name}"
            owners[renamed.get(name, name)] = module
        text, wanted = _stripped(module, source, trees[module], imports)
        used |= wanted
        parts.append(f"# --- {module} ---\n\n{_rename(text, renamed).strip()}\n")
    clashes = owners.keys() & {name.rpartition(" ")[2] for names in imports.names.values() for name in names}
    if clashes:
        raise ValueError(f"{owners[min(clashes)]} defines {min(clashes)}, which another module imports from elsewhere")
    unknown = used - owners.keys() - (offered or set())
    if unknown:
        raise ValueError(f"{min(unknown)} is imported and defined nowhere")
    if taken := sorted(used & (offered or set())):
        imports.names[f".{offers}"] = set(taken)
    body = "\n\n".join(parts)
    stub = ""
    if "_no_kernels" in body:
        imports.names.setdefault("typing", set()).add("Any")
        imports.names.setdefault("transformers.utils", set()).add("logging")
        stub = _NO_KERNELS
    return _HEADER.format(title=title, imports=imports) + stub + "\n" + body


def _stripped(module: str, source: str, tree: ast.Module, imports: _Imports) -> tuple[str, set[str]]:
    """The module without its docstring and imports, and the names that it wants of the package's other modules."""
    lines = source.splitlines()
    wanted: set[str] = set()
    top = set(tree.body)
    for node in ast.walk(tree):
        if not _is_removed(node, top):
            continue
        replacement = ""
        if isinstance(node, ast.Import | ast.ImportFrom):
            replacement = _import(module, node, node in top, imports, wanted)
        assert isinstance(node, ast.stmt)
        assert node.end_lineno is not None
        indent = " " * node.col_offset
        lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
        lines[node.lineno - 1] = indent + replacement if replacement else ""
    return "\n".join(lines), wanted


def _is_removed(node: ast.AST, top: set[ast.stmt]) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if node not in top:
        return False
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) == "__all__"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.lineno == 1


def _import(module: str, node: ast.Import | ast.ImportFrom, at_top: bool, imports: _Imports, wanted: set[str]) -> str:
    """What stands in the place of an import."""
    origin = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    ours = [name for name in (origin, *(alias.name for alias in node.names)) if name.split(".")[0] == PACKAGE]
    if not ours:
        if isinstance(node, ast.ImportFrom) and node.level:
            raise ValueError(f"{module}, line {node.lineno}: import from the defining module by its full name")
        if not at_top:
            return ast.unparse(node)
        found = {ast.unparse(alias) for alias in node.names}
        if isinstance(node, ast.Import):
            imports.modules |= found
        elif origin != "__future__":
            imports.names.setdefault(origin, set()).update(found)
        return ""
    if isinstance(node, ast.Import) or origin == PACKAGE:
        raise ValueError(f"{module}, line {node.lineno}: write `from {PACKAGE}.module import name`")
    if _left_out(origin):
        if not at_top:
            return 'raise ImportError("pip install lolcats")'
        return "\n".join(f"{alias.asname or alias.name} = _no_kernels" for alias in node.names)
    wanted.update(alias.name for alias in node.names)
    aliases = [f"{alias.asname} = {alias.name}" for alias in node.names if alias.asname]
    return "; ".join(aliases) or ("" if at_top else "pass")


def _defined(tree: ast.Module) -> list[str]:
    """Names that a module's top level binds, imports left aside."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return [name for name in found if name != "__all__"]


def _rename(source: str, names: dict[str, str]) -> str:
    """`source` with other private names."""
    if not names:
        return source
    tokens, before = [], ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string
        if token.type == tokenize.NAME and before != ".":
            text = names.get(text, text)
        tokens.append((token, text))
        before = token.string
    lines = source.splitlines()
    for token, text in reversed(tokens):
        if text != token.string:
            row, begin = token.start[0] - 1, token.start[1]
            lines[row] = lines[row][:begin] + text + lines[row][token.end[1] :]
    return "\n".join(lines)


def _closure(module: str, found: dict[str, str] | None = None) -> dict[str, str]:
    """Source of a module and of all of this package's modules that it imports, those first."""
    found = {} if found is None else found
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"{module} has no source file")
    source = Path(spec.origin).read_text()
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    for imported in [node.module or "" for node in nodes]:
        if imported.startswith(f"{PACKAGE}.") and imported not in found and not _left_out(imported):
            _closure(imported, found)
    found.setdefault(module, source)
    return found


def _left_out(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in LEFT_OUT)
