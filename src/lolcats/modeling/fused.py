"""Faster kernels inside one model while it trains or generates; afterwards the model is as it was.

liger-kernel (arXiv:2410.10989) has fused norms, gated activations and rotary embedding for many families. It
knows which modules of a family they fit, but also replaces names in transformers' modules, which every other
model of the family would see. Here only the given model changes: what liger wrote elsewhere is taken back.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lolcats.modeling.model import LolcatsForCausalLM

FAMILIES = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)
"""Model types that use liger-kernel."""

_ROTARY = "apply_rotary_pos_emb"


@contextmanager
def fused_kernels(model: LolcatsForCausalLM, setting: str, device: torch.device | None = None) -> Iterator[None]:
    """Within the block `model` computes with fused kernels, if it is on a GPU and `setting` is not "off".

    Args:
        device: where layers are when they run; None: where the model is.
    """
    with ExitStack() as stack:
        if setting != "off" and (device or model.device).type == "cuda":
            stack.enter_context(lora_in_model_type(model))
            if model.config.text_config.model_type in FAMILIES and importlib.util.find_spec("liger_kernel"):
                stack.enter_context(liger_kernels(model))
        yield


@contextmanager
def liger_kernels(model: LolcatsForCausalLM) -> Iterator[set[str]]:
    """Within the block `model`, and no other, computes with liger-kernel; yields the changed modules' names.

    Raises:
        KeyError: liger-kernel does not know the family.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    base = model.model
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[base.config.model_type]
    source = vars(sys.modules[type(base).__module__])
    names = dict(source)
    attributes = {path: (vars(module), dict(vars(module))) for path, module in base.named_modules()}
    try:
        apply(model=base, cross_entropy=False, fused_linear_cross_entropy=False)
        rotary: Any = source.get(_ROTARY)
    finally:
        changed_names = _changed(source, names)
        _restore(source, names, changed_names)
    if _ROTARY in changed_names:
        _set_rotary(base, source, rotary)
    changed = {path: keys for path, (now, before) in attributes.items() if (keys := _changed(now, before))}
    try:
        yield set(changed)
    finally:
        for path, keys in changed.items():
            _restore(*attributes[path], keys)


@contextmanager
def lora_in_model_type(model: nn.Module) -> Iterator[None]:
    """Within the block LoRA's products run in the type of the activations, if that is half precision.

    PEFT keeps adapters in float32 and computes in it, which for small ranks costs more than the projection
    itself. The weights and their gradients stay float32.
    """
    peft = sys.modules.get("peft.tuners.lora.layer")  # not imported: the model has none of its layers
    found = () if peft is None else (module for module in model.modules() if isinstance(module, peft.Linear))
    changed = [module for module in found if "forward" not in vars(module)]
    try:
        for module in changed:
            vars(module)["forward"] = MethodType(_lora_forward, module)
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)


def _lora_forward(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """base(x) + scaling * B A x for one plain adapter; everything else as PEFT does it."""
    names = [name for name in module.active_adapters if name in module.lora_A]
    plain = len(names) == 1 and names[0] not in module.lora_variant and not (args or kwargs)
    half = x.dtype in (torch.bfloat16, torch.float16) and not torch.is_autocast_enabled(x.device.type)
    if not plain or not half or module.disable_adapters or module.merged:
        return type(module).forward(module, x, *args, **kwargs)
    a, b = module.lora_A[names[0]], module.lora_B[names[0]]
    if b.bias is not None:
        return type(module).forward(module, x, *args, **kwargs)
    x_NI = x.flatten(0, -2)
    y_NO = module.base_layer(x_NI)
    z_NR = linear(module.lora_dropout[names[0]](x_NI), a.weight.to(x.dtype))
    y_NO.addmm_(z_NR, b.weight.to(x.dtype).t(), alpha=module.scaling[names[0]])
    return y_NO.unflatten(0, x.shape[:-1])


def _set_rotary(base: nn.Module, source: dict[str, Any], rotary: Any) -> None:
    """Attention modules call `rotary` in the place of the function that their source file names.

    Their forward functions are copied with other globals; the file itself does not change.
    """
    copies: dict[Any, FunctionType] = {}
    for module in base.modules():
        function = _written(type(module).forward)
        if not isinstance(function, FunctionType) or "forward" in vars(module):
            continue
        if function.__globals__ is not source or _ROTARY not in function.__code__.co_names:
            continue
        if function not in copies:
            copy = FunctionType(
                function.__code__,
                {**source, _ROTARY: rotary},
                function.__name__,
                function.__defaults__,
                function.__closure__,
            )
            copy.__kwdefaults__ = function.__kwdefaults__
            copies[function] = copy
        vars(module)["forward"] = MethodType(copies[function], module)


def _written(function: Any) -> Any:
    """A forward function as a model's source file has it, without the wrappers that transformers puts around it.

    From 5.24 on these take its arguments by their older names too.
    """

    def is_other(wrapper: Any) -> bool:
        return not getattr(wrapper, "__globals__", {}).get("__name__", "").startswith("transformers.")

    return inspect.unwrap(function, stop=is_other)


def _changed(now: dict[str, Any], before: dict[str, Any]) -> set[str]:
    return {key for key in now if key not in before or now[key] is not before[key]}


def _restore(now: dict[str, Any], before: dict[str, Any], keys: set[str]) -> None:
    for key in keys:
        if key in before:
            now[key] = before[key]
        else:
            now.pop(key, None)
