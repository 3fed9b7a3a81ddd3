"""Registers the linearized model with transformers as soon as transformers is there, and not before.

transformers offers packages no entry point for model types, and importing its model classes takes seconds, of which
`lolcats --help` needs none. So if transformers is not imported yet, a finder at the front of `sys.meta_path` waits for
its import: nothing simpler registers the model for a user who imports lolcats first, and stays fast.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def register_with_transformers() -> None:
    """Register now if transformers is imported, otherwise right after its import."""
    if "transformers" in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterTransformers) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTransformers())


def _register() -> None:
    # The package registers its classes at the end of its __init__. If this runs while it is being imported
    # (it is what imports transformers), the line does nothing, and the registration follows.
    importlib.import_module("lolcats.modeling")


class _AfterTransformers(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "transformers":
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader alone
        return spec
