"""Faster kernels in `generate`: compared with the model's own once, then in place during each call."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from lolcats.modeling.attention import separate_documents
from lolcats.modeling.cache_hooks import provide_cache_layer
from lolcats.modeling.fused import generation_kernels
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.ops.hybrid_attention.remember import begin_pass

_ABSENT = object()
# Modules whose hooks may stay: this package's, and transformers', which act where outputs were asked for.
_KNOWN_HOOKS = (
    begin_pass.__module__,
    separate_documents.__module__,
    provide_cache_layer.__module__,
    "transformers.utils.output_capturing",
)


@contextmanager
def kernels_for_generate(model: LolcatsForCausalLM) -> Iterator[None]:
    """Within the block `model` norms, adds and activates as in the engine, if it is in evaluation mode on one GPU.

    Its weights stay where they are. The first call compares results, which takes a second; so does the first one after
    something else has changed the modules (LoRA, say). Hooks see what they always see: where the kernels would pass
    them by, or the comparison would call them, the model computes as usual. Calls may overlap, in threads too.
    """
    kernels = None
    if not model.training and _on_gpu(model):
        with _lock:
            kernels = _kernels_of(model)
            if kernels is not None:
                kernels.enter()
    try:
        yield
    finally:
        if kernels is not None:
            with _lock:
                kernels.leave()


class _Changed(NamedTuple):
    """A module's attributes, by name, with the kernels and without; and its children."""

    module: nn.Module
    children: tuple[nn.Module | None, ...]
    within: dict[str, Any]
    without: dict[str, Any]


class _Kernels:
    """What the kernels change in a model's modules; to find it takes much longer than to repeat it.

    Attributes:
        calls: how many are running.
        passed_by: modules that may not be called while they do.
    """

    def __init__(self, model: LolcatsForCausalLM) -> None:
        self.calls = 0
        with ExitStack() as stack:
            if _is_whole(model):
                stack.enter_context(generation_kernels(model, warnings.warn, move_weights=False))
            within = [(module, dict(vars(module))) for module in model.modules()]
        self.changed: list[_Changed] = []
        for module, before in within:
            now = vars(module)
            names = [x for x in {**before, **now} if before.get(x, _ABSENT) is not now.get(x, _ABSENT)]
            if names:
                states = ({name: state.get(name, _ABSENT) for name in names} for state in (before, now))
                self.changed.append(_Changed(module, _children(module), *states))
        parts = (part for x in self.changed for part in (x.module, *x.children))
        self.passed_by = [part for part in parts if part is not None and not part._modules]

    def fit(self) -> bool:
        """Whether the modules are still those that were changed, or are being used as they are now."""
        return self.calls > 0 or all(
            _children(module) == children and all(vars(module).get(name, _ABSENT) is x for name, x in without.items())
            for module, children, _, without in self.changed
        )

    def enter(self) -> None:
        self.calls += 1
        if self.calls == 1:
            for changed in self.changed:
                _set(changed.module, changed.within)

    def leave(self) -> None:
        self.calls -= 1
        if self.calls == 0:
            for changed in self.changed:
                _set(changed.module, changed.without)


_lock = RLock()
_known: WeakKeyDictionary[LolcatsForCausalLM, _Kernels] = WeakKeyDictionary()


def _kernels_of(model: LolcatsForCausalLM) -> _Kernels | None:
    """The model's kernels; None if hooks forbid them now."""
    kernels = _known.get(model)
    if kernels is None or not kernels.fit():
        if _has_hooks(model.modules()):
            return None
        kernels = _known[model] = _Kernels(model)
    return None if _has_hooks(kernels.passed_by) else kernels


def _on_gpu(model: LolcatsForCausalLM) -> bool:
    return model.device.type == "cuda"


def _is_whole(model: LolcatsForCausalLM) -> bool:
    """Whether all weights are on one device, in ordinary tensors, and nothing moves them about."""
    parameters = list(model.parameters())
    plain = all(type(parameter.data) is Tensor and parameter.numel() for parameter in parameters)
    moved = any(hasattr(module, "_hf_hook") for module in model.modules())
    return plain and not moved and len({parameter.device for parameter in parameters}) == 1


def _has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether there are forward hooks but this package's and transformers'."""
    hooked = (module for module in modules if module._forward_hooks or module._forward_pre_hooks)
    hooks = (hook for x in hooked for hook in (*x._forward_hooks.values(), *x._forward_pre_hooks.values()))
    return any(getattr(hook, "__module__", None) not in _KNOWN_HOOKS for hook in hooks)


def _children(module: nn.Module) -> tuple[nn.Module | None, ...]:
    return tuple(module._modules.values())


def _set(module: nn.Module, attributes: dict[str, Any]) -> None:
    now = vars(module)
    for name, value in attributes.items():
        if value is _ABSENT:
            now.pop(name, None)
        else:
            now[name] = value
