"""A linearized folder as a vLLM model: the base family's own vLLM model with other attention layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMambaPrefixCaching
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, init_vllm_registered_model, maybe_prefix

from lolcats.errors import UserError
from lolcats.vllm_plugin import BASE_ARCHITECTURES
from lolcats.vllm_plugin.layer import ExactHeads, PagedHybridAttention, page_shape


class LolcatsForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsMambaPrefixCaching):
    """The base model in `model`, as in the folder's own transformers class, so that the names of weights agree.

    To vLLM every linearized model is a hybrid of layers with states and layers with keys and values, also when none
    of the second kind is left.

    Raises:
        UserError: a base model or a feature of vLLM that this does not support.
    """

    # Of all base classes above; quantization looks here which of vLLM's layers merge several of the checkpoint's.
    packed_modules_mapping = LlamaForCausalLM.packed_modules_mapping
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr={".self_attn.linear_attention.": ".self_attn.attn.linear_attention."}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        if config.text_config.model_type not in BASE_ARCHITECTURES:
            raise UserError(
                f"vLLM serves linearized models of the types {', '.join(BASE_ARCHITECTURES)}; this one was made from"
                f" {config.text_config.model_type!r}. `lolcats serve --engine lolcats` serves every linearized model"
            )
        both_kinds = any(layer.exact for layer in config.linear_layers)
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            if config.attention.decay:
                raise UserError("the decay of a head follows from its number among all heads; use one rank")
            if both_kinds:
                raise UserError(
                    "layers with both exact and linear heads cannot be divided among ranks, as one of them might have"
                    " none of a kind; use one rank"
                )
        if vllm_config.speculative_config is not None:
            raise UserError("speculative decoding needs states that can forget tokens; start vLLM without it")
        self.model = init_vllm_registered_model(
            vllm_config,
            prefix=maybe_prefix(prefix, "model"),
            hf_config=config.text_config,
            architectures=[BASE_ARCHITECTURES[config.text_config.model_type]],
        )
        for layer in config.layer_heads:
            attention = self.model.get_submodule(layer.module)
            if not layer.is_softmax:
                attention.attn = PagedHybridAttention(config, layer, _unregistered(attention.attn))
            elif both_kinds:  # else vLLM would keep these layers and single heads apart, and the others in small groups
                attention.attn = ExactHeads(_unregistered(attention.attn), layer.exact)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.model(*args, **kwargs)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.model.compute_logits(hidden_states)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_input_ids(input_ids)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    # --- what vLLM asks models whose layers have a state ------------------------------------------------------

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """One page of bytes."""
        model_config = vllm_config.model_config
        ranks = vllm_config.parallel_config.tensor_parallel_size
        return page_shape(model_config.hf_config, model_config.dtype, ranks)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """A snapshot for prefix caching is a copy of the whole page."""
        return (get_temporal_copy_spec,)


def _unregistered(softmax: Any) -> Any:
    """vLLM's attention of a layer, for whose keys and values no memory will be reserved."""
    del get_current_vllm_config().compilation_config.static_forward_context[softmax.layer_name]
    return softmax
