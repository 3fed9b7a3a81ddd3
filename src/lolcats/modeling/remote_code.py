"""The source files that let a folder load without this package (`trust_remote_code=True`).

They are the package's own modules, in which only the import lines change: transformers follows relative imports between
the files of one flat folder. `modeling_lolcats.py` takes the installed package if there is one.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ENTRY = "modeling_lolcats"
CLASSES = {"AutoConfig": "LolcatsConfig", "AutoModel": "LolcatsModel", "AutoModelForCausalLM": "LolcatsForCausalLM"}
AUTO_MAP = {auto_class: f"{ENTRY}.{name}" for auto_class, name in CLASSES.items()}
PATTERNS = (f"{ENTRY}.py", "lolcats_*.py")

_CONFIGURATION, _MODEL = "lolcats.modeling.configuration", "lolcats.modeling.model"
_KERNELS, _NO_KERNELS = "lolcats.ops.hybrid_attention.kernels", "lolcats.modeling.no_kernels"
_IMPORT = re.compile(r"^( *from) (lolcats[.\w]*)(?= import )", re.MULTILINE)
_ENTRY_SOURCE = '''"""The installed lolcats, which has GPU kernels, else its plain PyTorch code next to this file."""

try:
    from {package} import {classes}
except ModuleNotFoundError:
    from {copies}_configuration import LolcatsConfig  # first: it checks the release of transformers
    from {copies}_model import {classes}
'''


def write_code(folder: Path) -> None:
    """Write the source files, which the configuration names, into a folder for a model."""
    for name, source in source_files().items():
        (folder / name).write_text(source, encoding="utf-8")


@cache
def source_files() -> dict[str, str]:
    """File name -> content: the entry, the configuration, the model and all that they import of this package."""
    if not __name__.startswith("lolcats."):  # this is such a copy, among the others
        return {file.name: file.read_text() for pattern in PATTERNS for file in Path(__file__).parent.glob(pattern)}
    modules = [_CONFIGURATION, _MODEL]

    def relative(line: re.Match[str]) -> str:
        module = _NO_KERNELS if line[2].startswith(_KERNELS) else line[2]
        if module not in modules:
            modules.append(module)
        return f"{line[1]} .{_flat(module)}"

    files = {}
    for module in modules:  # which grows
        origin = getattr(find_spec(module), "origin", None)
        source = _IMPORT.sub(relative, Path(str(origin)).read_text(encoding="utf-8"))
        files[f"{_flat(module)}.py"] = f"# {module}, copied with its imports made relative.\n{source}"
    package = _MODEL.rpartition(".")[0]
    classes = ", ".join(sorted(CLASSES.values()))
    entry = _ENTRY_SOURCE.format(package=package, copies=f".{_flat(package)}", classes=classes)
    return {f"{ENTRY}.py": entry} | files


def _flat(module: str) -> str:
    return module.replace(".", "_")
