"""A decode step whose layers are compiled, to be captured in CUDA graphs: norms, projections, rotary embedding and MLP.

A layer's attention reads and writes a cache, so the compiler sees one operator in its place. That names no layer: all
layers of a kind, and their weights, share one compiled function.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lolcats.modeling.attention import ATTENTION_CALL, AttentionCall, lolcats_attention, provide_cache_layer
from lolcats.modeling.cache import CACHE_NAMES, shares_keys
from lolcats.modeling.model import LolcatsForCausalLM

# One row's products are then reductions, which read weights faster than cuBLAS. Small models wait for launches: those
# of q, k, v and of gate, up become one, and on Hopper a kernel starts before the one before it has ended.
OPTIONS: dict[str, Any] = dict.fromkeys(
    ("coordinate_descent_tuning", "combo_kernels", "benchmark_combo_kernel", "triton.enable_pdl"), True
)
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
        first_line = (str(error).splitlines() or [""])[0]
        warnings.warn(
            f"decoding with layers that are not compiled, slower: {type(error).__name__}: {first_line}", stacklevel=2
        )
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
            self.compiled[module] = torch.compile(plain, fullgraph=True, options=OPTIONS)
        return self.compiled[module]


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

    So do those that liger-kernel has changed (`lolcats.modeling.fused`).
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
