"""Imports follow the data flow: a module imports from layers before its own, without cycles. Parameters are few."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lolcats

PACKAGE = Path(lolcats.__file__).parent

# The order in which data flows; a module belongs to the longest prefix that fits. Entries of one line are
# peers: they may not import one another either.
LAYERS = [
    ["lolcats.errors"],
    ["lolcats.config"],
    ["lolcats.ops"],
    ["lolcats.modeling.layer"],
    ["lolcats.modeling"],
    ["lolcats.conversion"],
    ["lolcats.checkpoint.read"],
    ["lolcats.parallel"],
    ["lolcats.data"],
    ["lolcats.provenance", "lolcats.report", "lolcats.recipes"],
    ["lolcats.generation"],
    ["lolcats.evaluation"],
    ["lolcats.training"],
    ["lolcats.checkpoint"],
    ["lolcats.parallel.blockwise"],
    ["lolcats.self_data", "lolcats.run"],
    ["lolcats.pipeline"],
    ["lolcats.vllm_plugin"],
    ["lolcats.serving"],
    ["lolcats.analysis"],
    ["lolcats.plan"],
    ["lolcats.cli"],
    ["lolcats.demo"],
    ["lolcats.__main__"],
]
# The package's own __init__ offers names of later layers, and only when they are asked for.
LAZY = {"lolcats", "lolcats.registration"}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ["lolcats", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def layer_of(module: str) -> str | None:
    fitting = [name for name in LEVEL if module == name or module.startswith(name + ".")]
    return max(fitting, key=len, default=None)


def imports(source: str, module: str, known: set[str]) -> Iterator[str]:
    """Modules of this package that `source` imports anywhere in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "lolcats")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}, line {node.lineno}: relative import"
            origin = node.module or ""
            if origin.split(".")[0] == "lolcats":
                for alias in node.names:
                    inner = f"{origin}.{alias.name}"
                    yield inner if inner in known else origin


SOURCES = {module: path.read_text(encoding="utf-8") for module, path in modules().items()}
EDGES = {
    module: set(imports(source, module, set(SOURCES))) - {module, "lolcats"}
    for module, source in SOURCES.items()
    if module not in LAZY
}


@pytest.mark.parametrize("module", EDGES)
def test_imports_go_one_way(module):
    layer = layer_of(module)
    assert layer is not None, f"{module} is in no layer: add it to LAYERS"
    for imported in EDGES[module]:
        other = None if imported in LAZY else layer_of(imported)
        assert other is not None, f"{module} imports {imported}"
        assert other == layer or LEVEL[other] < LEVEL[layer], f"{module} imports {imported}, which is not before it"


def test_no_import_cycles():
    TopologicalSorter(EDGES).prepare()  # raises CycleError, which names them


def parameters(source: str, module: str) -> Iterator[tuple[str, int]]:
    """How many parameters functions have, and records that a call fills. Others dictate those of kernels and the tuples
    that these take, of PyTorch's operators, of `forward` and of what is registered with transformers."""
    dictated = {"forward", *re.findall(r"Interface\.register\(\w+, (\w+)\)", source)}
    for node in ast.walk(ast.parse(source)):
        made = " ".join(map(ast.unparse, [*getattr(node, "decorator_list", []), *getattr(node, "bases", [])]))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not re.search(r"triton\.jit|custom_op", made) and node.name not in dictated:
                names = {x.arg for x in ast.walk(node.args) if isinstance(x, ast.arg)}  # of *args, too
                yield f"{module}.{node.name}", len(names - {"self", "cls"})
        elif "dataclass" in made or ("NamedTuple" in made and ".kernels." not in module):
            fields = [x for x in node.body if isinstance(x, ast.AnnAssign) and "init=False" not in ast.unparse(x)]
            if not all(x.value for x in fields):  # else they are settings or counters
                yield f"{module}.{node.name}", len(fields)


def test_at_most_eight_parameters():
    """Of commands, which have their options, and of the operator there may be more."""
    own = {name: source for name, source in SOURCES.items() if not name.startswith("lolcats.cli")}
    found = [entry for name, source in own.items() for entry in parameters(source, name)]
    assert {name for name, count in found if count > 8} == {"lolcats.ops.hybrid_attention.api.hybrid_attention"}
    nine = [*"abcdefghi"]
    wide = f"def f({', '.join(nine[:-1])}, **i): 0\n@dataclass\nclass B:\n  {': int; '.join(nine)}: int"
    assert sorted(parameters(wide, "m")) == [("m.B", 9), ("m.f", 9)]
