"""Finding a model's attention layers by watching a forward pass of two tokens."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin
from transformers.initialization import no_init_weights
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lolcats.modeling.cache_hooks import shares_keys
from lolcats.modeling.call import ATTENTION_CALL, AttentionCall
from lolcats.modeling.compat import CACHE, given_cache

logger = logging.getLogger(__name__)

_MARKER = "lolcats_probe_marker"
# Modules that do not route compute their own attention while probed, and need an ordinary mask for it.
_PROBE = "lolcats_probe"
AttentionMaskInterface.register(_PROBE, eager_mask)


@dataclass
class LayerRecord:
    """What one attention module handed to the attention interface.

    Attributes:
        index: the module's layer_idx.
        module: its path in the model.
        num_heads, num_kv_heads, head_dim, value_dim: of queries, keys and values.
        sliding_window: the layer's native window in tokens, or None.
        unknown_inputs: inputs of attention beyond those that are understood, such as a position bias.
        causal: False if the module asks for attention in both directions.
        calls: times that it was called in one forward pass.
        cached_key_shape, key_shape: of the keys handed to the cache and of those attended over, [B, G, T, D].
        shares_cache: whether the layer's cache also holds the state of a mixer of another kind.
        shares_keys: whether the keys are an earlier layer's, which cached them.
        finds_cache: whether the module gets the cache as a keyword argument.
        passes_kwargs: whether it hands extra keyword arguments on.
        gets_call: whether keyword arguments of the whole model reach it.
    """

    index: int
    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    sliding_window: int | None
    unknown_inputs: tuple[str, ...]
    causal: bool
    key_shape: tuple[int, ...]
    calls: int = 1
    cached_key_shape: tuple[int, ...] | None = None
    shares_cache: bool = False
    shares_keys: bool = False
    finds_cache: bool = False
    passes_kwargs: bool = False
    gets_call: bool = False


def probe(model: PreTrainedModel) -> list[LayerRecord]:
    """Records of the modules that call the attention interface, in order of their layers.

    A copy without weights is run where the model allows it, else the model itself.

    Raises:
        RuntimeError, TypeError, ValueError, ...: whatever the model's own forward pass raises; its cause is what the
            copy without weights raised.
    """
    recorder = _Recorder()
    before, training = model.config._attn_implementation, model.training
    ALL_ATTENTION_FUNCTIONS[_PROBE] = recorder
    try:
        try:
            config = copy.deepcopy(model.config)
            config._attn_implementation = _PROBE
            with torch.device("meta"), no_init_weights():
                # bfloat16: kernels for experts do not take every type, and only shapes count here
                skeleton = type(model)(config).bfloat16()
            return _probe(skeleton.eval(), recorder)
        except (RuntimeError, TypeError, LookupError) as error:
            # Models that look at values (dynamic RoPE, routing of experts) need real ones, and torch says so; some
            # look their attention class up by its name, once, when they are built (GPT-J).
            logger.info("%s does not run without weights: %s", type(model).__name__, error)
            model.config._attn_implementation = _PROBE
            return _probe(model.eval(), recorder)
    finally:
        del ALL_ATTENTION_FUNCTIONS[_PROBE]
        model.config._attn_implementation = before
        model.train(training)


class _Recorder:
    """An attention function that writes down what it is given, and returns zeros."""

    def __init__(self) -> None:
        self.names: dict[nn.Module, str] = {}
        self.records: dict[str, LayerRecord] = {}

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        name = self.names[module]
        if name in self.records:
            self.records[name].calls += 1
        else:
            unknown = [item for item in ("position_bias", "attention_bias") if kwargs.get(item) is not None]
            self.records[name] = LayerRecord(
                index=getattr(module, "layer_idx", -1),
                module=name,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=key.shape[3],
                value_dim=value.shape[3],
                sliding_window=kwargs.get("sliding_window"),
                unknown_inputs=tuple(unknown),
                causal=kwargs.get("is_causal") is not False and getattr(module, "is_causal", True) is not False,
                key_shape=tuple(key.shape),
                shares_keys=shares_keys(module),
                finds_cache=bool(kwargs.get(_MARKER)),
                passes_kwargs=_MARKER in kwargs,
                gets_call=ATTENTION_CALL in kwargs,
            )
        batch, heads, tokens, _ = query.shape
        return value.new_zeros(batch, tokens, heads, value.shape[3]), None


def _probe(model: PreTrainedModel, recorder: _Recorder) -> list[LayerRecord]:
    """Two passes: the first finds the modules, the second tries to hand something through them."""
    records = _run(model, recorder)

    def mark(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, kwargs | {_MARKER: given_cache(kwargs) is not None}

    hooks = [model.get_submodule(record.module).register_forward_pre_hook(mark, with_kwargs=True) for record in records]
    try:
        return _run(model, recorder, **{ATTENTION_CALL: AttentionCall()})
    except TypeError as error:
        if "keyword argument" not in str(error):
            raise
        return records  # a module that takes no extra arguments: passes_kwargs and gets_call stay False
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _run(model: PreTrainedModel, recorder: _Recorder, **extra: Any) -> list[LayerRecord]:
    """One forward pass of two tokens."""
    recorder.names = {module: name for name, module in model.named_modules()}
    recorder.records = {}
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    embedding: Any = model.get_input_embeddings()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=embedding.weight.device)
    model(input_ids=tokens, use_cache=True, **{CACHE: cache}, **extra)
    for record in recorder.records.values():
        layer = cache.layers[record.index] if record.index < len(cache.layers) else None
        if (keys := getattr(layer, "keys", None)) is not None:
            record.cached_key_shape = tuple(keys.shape)
            record.shares_cache = isinstance(layer, LinearAttentionCacheLayerMixin)
    return sorted(recorder.records.values(), key=lambda record: record.index)
