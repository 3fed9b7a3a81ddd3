"""Hooks that give each attention module its layer of a `Cache`, of the kind that it needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from transformers.cache_utils import DynamicLayer, StaticLayer

from lolcats.modeling.cache import AttentionCacheLayer, ExactCacheLayer, HybridCacheLayer
from lolcats.modeling.call import ATTENTION_CALL, HYBRID
from lolcats.modeling.compat import given_cache, is_placeholder

NOT_QUANTIZED = (
    "a quantized cache has no effect on linear attention, whose states stay as they are: use the default cache, and"
    " set_attention(cache_bits=8) for the keys and values of windows and of heads that keep softmax attention"
)


def shares_keys(module: nn.Module) -> bool:
    """Whether an attention module attends over the keys and values of an earlier layer (Gemma 3n and 4)."""
    return bool(getattr(module, "is_kv_shared_layer", False))


def run_all_tokens(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the decoder: layers that share keys, if there are any, get all tokens.

    transformers gives them the last `logits_to_keep` alone, as softmax attention needs no more; a state does.
    """
    kwargs.pop("logits_to_keep", None)
    return args, kwargs


def provide_cache_layer(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of attention modules: puts the cache layer that attention fills into the `AttentionCall`.

    The attention function needs a handle to it, and transformers hands it only keys and values. A layer of the kind
    that the module needs takes the place of an empty one.

    Raises:
        ValueError: the cache is static, or holds tokens of this layer in another form.
    """
    cache = given_cache(kwargs)
    if cache is None:
        return args, kwargs
    call = kwargs.get(ATTENTION_CALL) or HYBRID
    index: Any = module.layer_idx
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index] if index < len(cache.layers) else None
    if is_placeholder(layer):  # transformers keeps nothing for it, as it attends over an earlier layer's keys
        layer = None
    if isinstance(layer, StaticLayer):
        raise ValueError("static caches hold buffers of keys, which linear layers do not have: use a DynamicCache")
    if hasattr(layer, "_dequantize"):
        raise ValueError(NOT_QUANTIZED)
    is_linear = call.mode == "hybrid" and "linear_attention" in module._modules
    kind = HybridCacheLayer if is_linear else ExactCacheLayer
    if not isinstance(layer, kind):
        tokens = 0 if layer is None else layer.get_seq_length()
        if tokens or not isinstance(layer, (DynamicLayer, AttentionCacheLayer, type(None))):
            raise ValueError(
                f"layer {index} of the cache is a {type(layer).__name__} with {tokens} tokens of another model or mode;"
                " start with an empty cache"
            )
        layer = kind(getattr(layer, "is_sliding", False))
        cache.layers[index : index + 1] = [layer]
    return args, kwargs | {ATTENTION_CALL: replace(call, layer=layer)}
