"""Fused code inside one model while it trains or generates; afterwards the model is as it was.

liger-kernel (arXiv:2410.10989) has fused norms, gated activations and rotary embedding for many families. It
knows which modules of a family they fit, but also replaces names in transformers' modules, which every other
model of the family would see. Here only the given model changes: what liger wrote elsewhere is taken back.

A decode step, which CUDA graphs capture, runs compiled layers instead (`CompiledLayers`): norms, projections, rotary
embedding and MLP. A layer's attention reads and writes a cache, so the compiler sees one operator in its place. That
names no layer: all layers of a kind, and their weights, share one compiled function.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lolcats.errors import first_line
from lolcats.modeling.attention import ATTENTION_CALL, AttentionCall, lolcats_attention, provide_cache_layer
from lolcats.modeling.cache import CACHE_NAMES, shares_keys
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.ops.hybrid_attention.kernels import missing

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
        _set_rotary(model, source, rotary)
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


def _set_rotary(model: LolcatsForCausalLM, source: dict[str, Any], rotary: Any) -> None:
    """Attention modules call `rotary` in the place of the function that their source file names.

    Their forward functions are copied with other globals; the file itself does not change.
    """
    copies: dict[Any, FunctionType] = {}
    for layer in model.config.layer_heads:
        module = model.model.get_submodule(layer.module)
        # Around it, from 5.24 on, transformers takes arguments by their older names, too.
        function: Any = inspect.unwrap(type(module).forward, stop=lambda x: x.__globals__ is source)
        if "forward" in vars(module) or function.__globals__ is not source:
            continue
        if function not in copies:
            names, rest = {**source, _ROTARY: rotary}, (function.__defaults__, function.__closure__)
            copies[function] = FunctionType(function.__code__, names, function.__name__, *rest)
            copies[function].__kwdefaults__ = function.__kwdefaults__
        vars(module)["forward"] = MethodType(copies[function], module)


def _changed(now: dict[str, Any], before: dict[str, Any]) -> set[str]:
    return {key for key in now if key not in before or now[key] is not before[key]}


def _restore(now: dict[str, Any], before: dict[str, Any], keys: set[str]) -> None:
    for key in keys:
        if key in before:
            now[key] = before[key]
        else:
            now.pop(key, None)


# One row's products are then reductions, which read weights faster than cuBLAS. On Hopper a kernel starts before the
# one before it has ended.
OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True, "triton.enable_pdl": True}
# Of small models, which wait for launches rather than for memory: those of q, k, v and of gate, up become one.
SMALL: dict[str, Any] = {"combo_kernels": True, "benchmark_combo_kernel": True}
MOST_VARIANTS = 64  # of a layer's code: kinds of layers, models of a process, one row or several
_KNOWN_CODE = ("torch.nn.", "transformers.models.", "transformers.activations", "lolcats.")


class CompiledLayers:
    """Compiles the decoder layers and the head of `model`, as far as they are the plain ones of their family.

    Modules that are quantised, have adapters, hooks or other forward functions, and layers that keep more in a cache
    than their own attention does, stay as they are.

    Attributes:
        works: False once compilation has failed.
    """

    def __init__(self, model: LolcatsForCausalLM, enabled: bool) -> None:
        self.model = model
        self.works = enabled and not any(map(shares_keys, model.modules()))
        self.compiled: dict[nn.Module, Callable[..., Any]] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the block the layers run compiled, one token of each row at a time, without gradients."""
        if not self.works:
            yield
            return
        replaced = self._forwards()
        own = [part for module in replaced for part in module.modules() if "forward" in vars(part)]
        before = {part: vars(part).pop("forward") for part in own}
        try:
            for module, forward in replaced.items():
                vars(module)["forward"] = forward
            with torch._dynamo.config.patch(recompile_limit=MOST_VARIANTS):
                yield
        finally:
            for module in replaced:
                vars(module).pop("forward", None)
            for part, forward in before.items():
                vars(part)["forward"] = forward

    def give_up(self, error: Exception) -> bool:
        """Stop compiling after an error, with a warning; False: there was nothing compiled."""
        if not self.works:
            return False
        self.works = False
        reason = f"{type(error).__name__}: {first_line(error)}"
        warnings.warn(f"decoding with layers that are not compiled, slower: {reason}", stacklevel=2)
        return True

    def _forwards(self) -> dict[nn.Module, Callable[..., Any]]:
        base: Any = self.model.model
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        for record in self.model.config.layer_heads:
            layer = base.get_submodule(record.module.rpartition(".")[0])
            if _is_plain(layer):
                forwards[layer] = partial(_layer, self._compile(layer), base.get_submodule(record.module))
        head = self.model.get_output_embeddings()
        return forwards | ({head: self._compile(head)} if _is_plain(head) else {})

    def _compile(self, module: nn.Module) -> Callable[..., Any]:
        if module not in self.compiled:
            plain = MethodType(type(module).forward, module)
            self.compiled[module] = torch.compile(plain, fullgraph=True, backend=_compile_graph)
        return self.compiled[module]


def _compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Inductor, behind `use_few_rows` where its kernel was measured."""
    from torch._inductor.compile_fx import compile_fx

    device, large = next(x.device for x in inputs if isinstance(x, Tensor)), False
    if missing() is None and device.type == "cuda":
        from lolcats.ops.few_rows import early_launch, use_few_rows  # imports Triton

        large = early_launch(device)["EARLY"] and use_few_rows(graph)  # on Hopper
    return compile_fx(graph, inputs, config_patches=OPTIONS | ({} if large else SMALL))


class _Waiting(threading.local):
    """The layer that runs: its attention module, and its call with the cache."""

    call: tuple[nn.Module, AttentionCall] | None = None


_waiting = _Waiting()


def _layer(compiled: Callable[..., Any], attention: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A compiled layer's forward pass, without cache: its attention gets it."""
    _waiting.call = attention, provide_cache_layer(attention, (), kwargs)[1][ATTENTION_CALL]
    given = {name: None if name in CACHE_NAMES else value for name, value in kwargs.items()}
    return compiled(*args, **given | {ATTENTION_CALL: _COMPILED})


@torch.library.custom_op("lolcats::attention_of_layer", mutates_args=())
def _attention_of_layer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """`lolcats_attention` of the layer that runs, as the compiler sees it."""
    if _waiting.call is None:
        raise RuntimeError("the layer has more than one attention")
    (module, call), _waiting.call = _waiting.call, None
    settings = scaling, 0.0, sliding_window, softcap, s_aux
    return lolcats_attention(module, query, key, value, None, *settings, attention_call=call)[0]


@_attention_of_layer.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1])


_COMPILED = AttentionCall(operator=_attention_of_layer)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module and all its parts compute what their classes in transformers or PyTorch do, with plain weights.

    So do those that liger-kernel has changed.
    """
    for part in module.modules():
        if not type(part).__module__.startswith(_KNOWN_CODE) or hasattr(part, "_hf_hook"):
            return False
        if part._forward_hooks or {*part._forward_pre_hooks.values()} - {provide_cache_layer}:
            return False
        own = vars(part).get("forward")
        liger = getattr(own, "__module__", "").startswith(("liger_kernel.", "transformers.models."))
        if own is not None and not (isinstance(own, MethodType) and liger):
            return False
    return all(type(x.data) is Tensor and x.is_floating_point() for x in module.parameters())
