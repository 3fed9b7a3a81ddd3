"""Registers the linearized model with transformers as soon as transformers is there, and not before.

transformers offers packages no entry point for model types, and importing its model classes takes seconds, of which
`lolcats --help` needs none. So if transformers is not imported yet, a finder at the front of `sys.meta_path` waits for
its import: nothing simpler registers the model for a user who imports lolcats first, and stays fast.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
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
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    """Another loader, followed by the registration."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader: tools look for source files and resources through it.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        _register()
