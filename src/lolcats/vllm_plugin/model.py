"""A linearized folder as a vLLM model: the base family's own vLLM model with other attention layers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models import utils
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsHybrid,
    SupportsKVCacheGrouping,
    SupportsMambaPrefixCaching,
)
from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec, MambaSpec

from lolcats.errors import UserError
from lolcats.modeling import LolcatsConfig
from lolcats.modeling.cache_size import native_window
from lolcats.vllm_plugin.exact import unregistered
from lolcats.vllm_plugin.layer import PagedHybridAttention
from lolcats.vllm_plugin.pages import group_pages, heads_of_rank, is_bounded, model_pages, pages_in_block, split_layers

logger = logging.getLogger("vllm.lolcats")
ELSEWHERE = "`lolcats serve` serves every linearized model"


class LolcatsForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsKVCacheGrouping, SupportsMambaPrefixCaching):
    """The base model in `model`, as in the folder's own transformers class, so that the names of weights agree.

    To vLLM every linearized model is a hybrid of layers with states and layers with keys and values, also when none
    of the second kind is left.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        text_config = config.text_config
        if len(config.layer_heads) < text_config.num_hidden_layers:
            raise UserError(
                f"{text_config.model_type!r} has layers without attention, whose states have no place beside"
                f" those of linear attention; {ELSEWHERE}"
            )
        ranks = vllm_config.parallel_config.tensor_parallel_size
        # Exact heads that keep all keys, or those of a native window, have vLLM's own attention.
        paged = [layer for layer in config.layer_heads if layer.exact and not is_bounded(config, layer)]
        both_kinds = any(not layer.is_softmax for layer in paged)
        if config.attention.cache_bits is not None and any(native_window(config, layer) is None for layer in paged):
            logger.warning("vLLM keeps exact heads in its own type, the model's or --kv-cache-dtype fp8, not as int8")
        if vllm_config.speculative_config is not None:
            raise UserError("speculative decoding needs states that can forget tokens; start vLLM without it")
        self.model = utils.init_vllm_registered_model(
            vllm_config,
            prefix=utils.maybe_prefix(prefix, "model"),
            hf_config=text_config,
            architectures=[architecture(text_config.model_type)],
        )
        # Name of a layer's feature maps in the folder -> the layer's place.
        self.places: dict[str, str | None] = {}  # None: all heads that this rank has of it are exact
        found = attention_layers(self.model, config, ranks)
        for layer in config.layer_heads:
            path, softmax = found[layer.index]
            own = heads_of_rank(layer, get_tensor_model_parallel_rank(), ranks)
            self.places[f"model.{layer.module}"] = None if own.is_softmax else f"model.{path}"
            # With both kinds also softmax: vLLM would keep these layers apart from single heads, and in small groups.
            if both_kinds or not own.is_softmax or is_bounded(config, layer):
                self.model.set_submodule(path, PagedHybridAttention(config, layer, unregistered(softmax)))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.model(*args, **kwargs)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.model.compute_logits(hidden_states)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_input_ids(input_ids)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """The feature maps; the base model's class loads all else."""
        loaded = set()

        def of_base_model() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                module, linear, parameter = name.partition(".linear_attention.")
                if not linear:
                    yield name, tensor
                    continue
                if self.places[module] is not None:
                    place = f"{self.places[module]}{linear}{parameter}"
                    own: Any = self.get_parameter(place)
                    own.weight_loader(own, tensor)
                    loaded.add(place)

        return utils.AutoWeightsLoader(self).load_weights(of_base_model()) | loaded

    # --- what vLLM asks models whose layers have a state ------------------------------------------------------

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Bytes of the pages that are as large as a block of attention."""
        model_config = vllm_config.model_config
        ranks = vllm_config.parallel_config.tensor_parallel_size
        size, _ = model_pages(model_config.hf_config, model_config.dtype, ranks)
        return ((pages_in_block(vllm_config) * size,),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    @classmethod
    def get_kv_cache_groups(
        cls, vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec]
    ) -> list[KVCacheGroupSpec]:
        """vLLM's, but with all pages or exact heads of a layer side by side in one group, which has one table."""
        groups = get_kv_cache_groups(vllm_config, kv_cache_spec)
        others = [group for group in groups if not isinstance(group.kv_cache_spec, MambaSpec)]
        if not 0 < len(others) < len(groups):  # one group of all
            return groups
        kinds: dict[KVCacheSpec, list[KVCacheGroupSpec]] = {}
        for group in groups:
            kinds.setdefault(group.kv_cache_spec, []).append(group)
        most, found = max(len(group.layer_names) for group in others), []
        for spec, same in kinds.items():
            names = {name for group in same for name in group.layer_names}
            layers: dict[str, list[str]] = {}
            for name in kv_cache_spec:
                if name in names:
                    layers.setdefault(name.rpartition(".")[0], []).append(name)
            pages = [*layers.values()]
            is_state = isinstance(spec, MambaSpec)
            parts = group_pages(pages, most, len(others)) if is_state else split_layers(pages, len(same))
            found += [KVCacheGroupSpec(part, spec) for part in parts]
        return found

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """A snapshot for prefix caching is a copy of the whole page."""
        return (get_temporal_copy_spec,)

    @staticmethod
    def get_model_state_cls() -> Any:
        from lolcats.vllm_plugin.moves import StateMoves  # needs Triton, as the model runner that asks

        return StateMoves


def architecture(model_type: str) -> str:
    """The class of transformers for a base model's type, by whose name vLLM finds its own."""
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(f"vLLM has no model of text alone for {model_type!r}; {ELSEWHERE}")
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]


def attention_layers(model: nn.Module, config: LolcatsConfig, ranks: int) -> dict[int, tuple[str, Attention]]:
    """Path and layer of vLLM's attention, by the layer's index."""
    model_type = config.text_config.model_type
    found = {}
    for path, module in model.named_modules():
        if not isinstance(module, AttentionLayerBase):
            continue
        if type(module) is not Attention:
            raise UserError(
                f"vLLM builds {model_type!r} with {type(module).__name__}, which is not its ordinary attention layer;"
                f" {ELSEWHERE}"
            )
        for what, has in {
            "attends over the keys of an earlier layer": module.kv_sharing_target_layer_name is not None,
            "has position biases (ALiBi)": module.impl.alibi_slopes is not None,
        }.items():
            if has:
                raise UserError(f"{model_type!r}: layer {path} {what}; {ELSEWHERE}")
        found[utils.extract_layer_index(module.layer_name)] = path, module
    for layer in config.layer_heads:
        if layer.index not in found:
            raise UserError(f"vLLM builds {model_type!r} without attention in layer {layer.index}; {ELSEWHERE}")
        path, softmax = found[layer.index]
        shape = softmax.num_heads, softmax.num_kv_heads, softmax.head_size
        wanted = layer.num_heads // ranks, max(layer.num_kv_heads // ranks, 1), layer.head_dim
        if shape != wanted:
            raise UserError(
                f"vLLM builds {model_type!r} with {shape} query heads, KV heads and dimensions in {path}, expected"
                f" {wanted}; {ELSEWHERE}"
            )
    return found
