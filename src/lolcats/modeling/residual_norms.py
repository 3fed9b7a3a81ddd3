"""Sums of the residual stream and the norm after them in one launch, in layers built as Llama's.

In a step of decoding a sum or a norm takes about as long as a launch. Decoder layers of transformers have no place for
both together: the sum that ends a layer belongs to the norm that begins the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.modeling.products import mentions, other_forwards

_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


@contextmanager
def residual_norms(model: LolcatsForCausalLM) -> Iterator[None]:
    """Within the block, where no gradient is needed, `model` adds to its residual stream and norms it in one launch.

    For norms that `liger_kernels` has changed, in layers whose forward pass is Llama's; all others are left alone.
    """
    decoder = model.get_decoder()
    lists = [module for module in decoder.children() if isinstance(module, nn.ModuleList)]
    layers = [layer for layer in (lists[0] if len(lists) == 1 else ()) if _is_pre_norm(layer)]
    after: list[Any] = [layer.input_layernorm for layer in layers[1:]] + [getattr(decoder, "norm", None)]
    patches: dict[nn.Module, Callable[..., Any]] = {}
    for layer, norm in zip(layers, after, strict=False):
        next_norm = _NextNorm(norm) if _takes(norm) else None
        patches[layer] = partial(_layer, layer, layer.forward, next_norm)
        if next_norm is not None:
            patches[norm] = next_norm.forward
    with other_forwards(patches):
        yield


class _NextNorm:
    """The norm that follows a layer: what the layer has made of its own output is handed out once, for that output."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm, self.plain = norm, norm.forward
        self.kept: tuple[weakref.ref[Tensor], Tensor] | None = None  # in one piece: threads may share the module

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x, whose norm is kept."""
        total, result = add_and_norm(self.norm, residual, x)
        self.kept = weakref.ref(total, self._forget), result
        return total

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept
        if kept is None or kept[0]() is not x:
            return self.plain(x)
        self.kept = None
        return kept[1]

    def _forget(self, ended: weakref.ref[Tensor]) -> None:
        if (kept := self.kept) is not None and kept[0] is ended:
            self.kept = None


def _layer(
    layer: Any, forward: Callable[..., Tensor], end: _NextNorm | None, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """A layer's forward pass; `end` is the norm after it, if that is known."""
    if args or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return forward(hidden_states, *args, **kwargs)
    x, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    residual, x = add_and_norm(layer.post_attention_layernorm, hidden_states, x)
    x = layer.mlp(x)
    return residual + x if end is None else end.add(residual, x)


def add_and_norm(norm: Any, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """residual + x, rounded to their type, and its norm; no gradient."""
    from lolcats.ops.add_norm_kernel import add_norm  # imports Triton

    return add_norm(residual.contiguous(), x.contiguous(), norm.weight, norm.variance_epsilon)


def _is_pre_norm(layer: nn.Module) -> bool:
    """Whether a layer computes what `_layer` does: its class mentions its four parts and nothing else."""
    if mentions(layer) != _PARTS or "forward" in vars(layer):
        return False
    return _takes(layer.input_layernorm) and _takes(layer.post_attention_layernorm)


def _takes(norm: Any) -> bool:
    """Whether this is a norm as liger-kernel has changed it, with weights in ordinary memory."""
    if getattr(norm, "casting_mode", None) != "llama" or norm.offset or hasattr(norm, "_hf_hook"):
        return False
    return type(norm.weight.data) is Tensor and not norm.weight.is_meta
