"""Finding a model's attention layers by watching a forward pass of two tokens."""

from __future__ import annotations

import copy
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin
from transformers.initialization import no_init_weights
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lolcats.config.attention import LayerHeads
from lolcats.modeling.attention import ATTENTION_CALL, AttentionCall
from lolcats.modeling.cache import CACHE, given_cache, shares_keys

logger = logging.getLogger(__name__)

_MARKER = "lolcats_probe_marker"
# Modules that do not route compute their own attention while probed, and need an ordinary mask for it.
_PROBE = "lolcats_probe"
AttentionMaskInterface.register(_PROBE, eager_mask)


Calls = dict[nn.Module, list[tuple[Tensor, Tensor, Tensor, dict[str, Any]]]]
"""What attention modules gave to attention in a forward pass: queries, keys, values and what else."""


class AttentionLayer(NamedTuple):
    """What an attention layer showed.

    Attributes:
        heads: its place and shape, without exact heads.
        sliding_window: the native window in tokens, or None.
        obstacle: why it cannot become linear, if so.
    """

    heads: LayerHeads
    sliding_window: int | None
    obstacle: str | None


def probe(model: PreTrainedModel) -> list[AttentionLayer]:
    """The modules that call the attention interface, in order of their layers.

    A copy without weights is run where the model allows it, else the model itself.

    Raises:
        RuntimeError, TypeError, ValueError, ...: whatever the model's own forward pass raises; its cause is what the
            copy without weights raised.
    """
    calls: Calls = {}

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        calls.setdefault(module, []).append((query, key, value, kwargs))
        batch, heads, tokens, _ = query.shape
        return value.new_zeros(batch, tokens, heads, value.shape[3]), None

    before, training = model.config._attn_implementation, model.training
    ALL_ATTENTION_FUNCTIONS[_PROBE] = attend
    try:
        try:
            config = copy.deepcopy(model.config)
            config._attn_implementation = _PROBE
            with torch.device("meta"), no_init_weights():
                # bfloat16: kernels for experts do not take every type, and only shapes count here
                skeleton = type(model)(config).bfloat16()
            return _probe(skeleton.eval(), calls)
        except (RuntimeError, TypeError, LookupError) as error:
            # Models that look at values (dynamic RoPE, routing of experts) need real ones, and torch says so; some
            # look their attention class up by its name, once, when they are built (GPT-J).
            logger.info("%s does not run without weights: %s", type(model).__name__, error)
            model.config._attn_implementation = _PROBE
            return _probe(model.eval(), calls)
    finally:
        del ALL_ATTENTION_FUNCTIONS[_PROBE]
        model.config._attn_implementation = before
        model.train(training)


def _probe(model: PreTrainedModel, calls: Calls) -> list[AttentionLayer]:
    """Two passes: the first finds the modules, the second tries to hand something through them."""
    found = _run(model, calls)

    def mark(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, kwargs | {_MARKER: given_cache(kwargs) is not None}

    modules = [model.get_submodule(layer.heads.module) for layer in found]
    hooks = [module.register_forward_pre_hook(mark, with_kwargs=True) for module in modules]
    try:
        return _run(model, calls, **{ATTENTION_CALL: AttentionCall()})
    except TypeError as error:
        if "keyword argument" not in str(error):
            raise
        return found  # a module that takes no extra arguments, which is an obstacle in the first pass
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _run(model: PreTrainedModel, calls: Calls, **extra: Any) -> list[AttentionLayer]:
    """One forward pass of two tokens."""
    calls.clear()
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    embedding: Any = model.get_input_embeddings()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=embedding.weight.device)
    model(input_ids=tokens, use_cache=True, **{CACHE: cache}, **extra)
    names = {module: name for name, module in model.named_modules()}
    found = []
    for module, seen in calls.items():
        index: Any = getattr(module, "layer_idx", -1)
        q, k, v, kwargs = seen[0]
        heads = LayerHeads(
            index=index, module=names[module], num_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=k.shape[3]
        )
        obstacle = _obstacle(module, k, v, kwargs, cache.layers[index] if index < len(cache.layers) else None)
        if len(seen) > 1:
            obstacle = obstacle or f"calls attention {len(seen)} times in one pass"
        found.append(AttentionLayer(heads, kwargs.get("sliding_window"), obstacle))
    return sorted(found, key=lambda layer: layer.heads.index)


def _obstacle(module: nn.Module, k: Tensor, v: Tensor, kwargs: dict[str, Any], layer: Any) -> str | None:
    """Why an attention module cannot become linear, if so: by what it gave to attention, and its cache layer."""
    cached = getattr(layer, "keys", None)
    if cached is None and not shares_keys(module):
        return "does not cache keys and values of its own"
    if cached is not None and cached.shape != k.shape:
        return (
            f"caches compressed latents {list(cached.shape)} instead of the keys {list(k.shape)} it attends over"
            " (multi-head latent attention)"
        )
    if cached is not None and isinstance(layer, LinearAttentionCacheLayerMixin):
        return "has a mixer of another kind (a state space, a convolution) beside its attention, in one cache layer"
    if v.shape[3] > k.shape[3]:
        return f"has values of {v.shape[3]} dimensions, more than its keys of {k.shape[3]}"
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        return "is not causal"
    if unknown := [name for name in ("position_bias", "attention_bias") if kwargs.get(name) is not None]:
        return f"adds {', '.join(unknown)} to its attention scores"
    if not kwargs.get(_MARKER):
        return "does not hand its keyword arguments to the attention function, so that its state cannot be reached"
    if ATTENTION_CALL not in kwargs:
        return (
            "does not get the keyword arguments of the model's forward pass, which say what attention the pass wants:"
            " a decoder layer of this family drops them"
        )
    return None
