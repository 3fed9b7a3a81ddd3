"""Hooks that give each attention module its layer of a `Cache`, of the kind that it needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from lolcats.modeling.cache import (
    CACHE_LAYER,
    AttentionCacheLayer,
    BoundedLayer,
    BoundedSlidingLayer,
    HybridCacheLayer,
    PreallocatedLayer,
    growing_layer,
)
from lolcats.modeling.call import ATTENTION_CALL
from lolcats.modeling.compat import given_cache, is_placeholder

NOT_QUANTIZED = (
    "a quantized cache has no effect on linear attention, whose states stay as they are: use the default cache, and"
    " set_attention(exact_bits=8) for the keys and values of heads that keep softmax attention"
)


def adapt_static_cache(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the decoder: lets a StaticCache serve linear and softmax layers.

    transformers' static layers return whole buffers, with masks by position, which linear layers cannot
    use. Their places are taken by layers of this module; `provide_cache_layer` then replaces those of linear
    layers by states, before any memory is reserved.

    Raises:
        ValueError: the cache holds tokens of another model.
    """
    cache = given_cache(kwargs)
    if isinstance(cache, Cache) and _foreign_static(cache):
        _replace_static_layers(cache)


def _foreign_static(cache: Cache) -> list[int]:
    """Places of transformers' own static layers."""
    return [
        i for i, x in enumerate(cache.layers) if isinstance(x, StaticLayer) and not isinstance(x, PreallocatedLayer)
    ]


@torch.compiler.disable
def _replace_static_layers(cache: Cache) -> None:
    layers: list[Any] = cache.layers
    for index in _foreign_static(cache):
        layer = layers[index]
        if (tokens := int(layer.get_seq_length())) > 0:
            raise ValueError(
                f"layer {index} of the cache is a {type(layer).__name__} with {tokens} tokens of another model; start"
                " with an empty cache"
            )
        new_layer = BoundedSlidingLayer if layer.is_sliding else PreallocatedLayer
        layers[index] = new_layer(layer.max_cache_len)


def shares_keys(module: nn.Module) -> bool:
    """Whether an attention module attends over the keys and values of an earlier layer (Gemma 3n and 4)."""
    return bool(getattr(module, "is_kv_shared_layer", False))


def run_all_tokens(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of a decoder whose last layers share keys: they get all tokens.

    transformers gives them the last `logits_to_keep` alone, as softmax attention needs no more; a state does.
    """
    return args, {name: value for name, value in kwargs.items() if name != "logits_to_keep"}


def hybrid_cache_layer(cache: Cache, layer_idx: int) -> HybridCacheLayer:
    """The layer's state in `cache`; an empty layer of another kind is replaced in place.

    Raises:
        ValueError: the cache holds keys and values of this layer already.
    """
    layer = _layer_of(cache, layer_idx)
    if isinstance(layer, HybridCacheLayer):
        return layer
    if layer is None:
        return _take_place(cache, layer_idx, HybridCacheLayer(is_compileable=cache.is_compileable))
    if hasattr(layer, "_dequantize"):
        raise ValueError(NOT_QUANTIZED)
    if not isinstance(layer, (DynamicLayer, PreallocatedLayer)) or layer.get_seq_length() > 0:
        raise ValueError(
            f"layer {layer_idx} of the cache is a {type(layer).__name__} with {layer.get_seq_length()} tokens; linear"
            " attention needs an empty cache. Was the cache filled in softmax mode or by another model?"
        )
    return _take_place(cache, layer_idx, HybridCacheLayer(layer.is_sliding, layer.is_compileable))


def _layer_of(cache: Cache, layer_idx: int) -> Any:
    """The layer of `cache`; None: transformers keeps nothing for it, as it attends over an earlier one's keys."""
    while len(cache.layers) <= layer_idx and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layers: list[Any] = cache.layers
    return None if layer_idx >= len(layers) or is_placeholder(layers[layer_idx]) else layers[layer_idx]


def _take_place(cache: Cache, layer_idx: int, layer: Any) -> Any:
    """`layer`, which is the layer's in `cache` from now on."""
    cache.layers[layer_idx : layer_idx + 1] = [layer]
    return layer


def bound_layer(cache: Cache, module: nn.Module) -> None:
    """Give a layer whose heads are all exact, and have a window or 8 bits, a cache layer that keeps to them.

    It takes the place of an empty one without a native window.

    Raises:
        ValueError: the cache holds keys and values of this layer already.
    """
    attention, layer_idx = getattr(module, "attention_config", None), int(module.layer_idx)  # type: ignore[arg-type]
    if attention is None or getattr(module, "sliding_window", None) is not None:
        return
    if attention.exact_tokens is None and attention.exact_bits is None:
        return
    old = _layer_of(cache, layer_idx) or DynamicLayer()
    if not old.is_sliding and isinstance(old, (DynamicLayer, PreallocatedLayer)):
        if old.get_seq_length() > 0:
            raise ValueError(
                f"layer {layer_idx} of the cache has {old.get_seq_length()} tokens of another model or of softmax mode;"
                " start with an empty cache"
            )
        _take_place(cache, layer_idx, BoundedLayer(old.is_compileable))


def provide_cache_layer(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of attention modules: adds the cache layer that attention fills to the keyword arguments.

    The attention function needs a handle to it, and transformers hands it only keys and values.
    """
    cache = given_cache(kwargs)
    if cache is None:
        return args, kwargs
    layer_idx: Any = module.layer_idx
    wanted = kwargs.get(ATTENTION_CALL)
    hybrid = wanted is None or wanted.mode == "hybrid"
    if "linear_attention" not in module._modules:  # a softmax layer, whose keys an ordinary cache layer joins
        if hybrid:
            bound_layer(cache, module)
        own = layer_idx < len(cache.layers) and isinstance(cache.layers[layer_idx], AttentionCacheLayer)
        if hybrid and shares_keys(module):  # the earlier layer may hand on only the new ones
            own = True
            if _layer_of(cache, layer_idx) is None:
                _take_place(cache, layer_idx, growing_layer(getattr(module, "sliding_window", None)))
        return args, kwargs | ({CACHE_LAYER: cache.layers[layer_idx]} if own else {})
    if hybrid:
        return args, kwargs | {CACHE_LAYER: hybrid_cache_layer(cache, layer_idx)}
    if layer_idx < len(cache.layers) and isinstance(cache.layers[layer_idx], HybridCacheLayer):
        if cache.layers[layer_idx].get_seq_length() > 0:
            raise ValueError(
                f"layer {layer_idx}: softmax mode, but the cache holds the layer's linear state; start with a new cache"
            )
        cache.layers[layer_idx] = DynamicLayer()
    return args, kwargs
