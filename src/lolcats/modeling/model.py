"""A linearized model: the base model with another attention, used like any transformers model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS

from lolcats.config.attention import AttentionConfig
from lolcats.modeling.attention import (
    ATTENTION_CALL,
    ATTENTION_NAME,
    NOT_QUANTIZED,
    AttentionCall,
    find_sequences,
    provide_cache_layer,
    restore_batch,
)
from lolcats.modeling.cache import CACHE, given_cache, recurrent_layers
from lolcats.modeling.cache_size import window_in_budget
from lolcats.modeling.configuration import LolcatsConfig
from lolcats.modeling.graphs import CapturedSteps
from lolcats.modeling.layer import HybridAttention
from lolcats.modeling.remote_code import write_code

_HUB_OPTIONS = ("repo_id", "commit_message", "private", "token", "revision", "create_pr")


class LolcatsPreTrainedModel(PreTrainedModel):
    """A base model whose attention layers are (mostly) linear.

    It is kept whole in `model`, with its language-model head; its attention modules reach hybrid attention through
    transformers' attention interface.

    Args:
        config: the base configuration and the linearized layers.
        base_model: the model to wrap, changed in place; None: a new one from `config.text_config`.
    """

    config: LolcatsConfig
    config_class = LolcatsConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = False
    _keep_in_fp32_modules_strict = ["linear_attention"]

    def __init__(self, config: LolcatsConfig, base_model: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        given = base_model is not None
        if base_model is None:
            base_model = AutoModelForCausalLM.from_config(config.text_config, attn_implementation=ATTENTION_NAME)
        self.model = base_model
        config.text_config = base_model.config
        # All that may fail comes before the first change of a given base model.
        self._fitting(config.attention)
        added = {}
        for layer in config.linear_layers:
            attention = base_model.get_submodule(layer.module)
            weight = next(chain(attention.parameters(), attention.buffers()))  # quantised ones may be buffers
            shape = layer.num_heads, layer.num_kv_heads, layer.head_dim
            added[layer.index] = HybridAttention(config.attention, *shape, exact=layer.exact, device=weight.device)
        if given:
            for module in base_model.modules():
                module._is_hf_initialized = True  # post_init must not initialise its weights again
        # Whatever attn_implementation was asked for, the base model goes through ours.
        base_model.config._attn_implementation = ATTENTION_NAME
        base_model.config.name_or_path = ""  # would be saved within the configuration, a local folder too
        for layer in config.layer_heads:
            module = self.model.get_submodule(layer.module)
            module.register_forward_pre_hook(provide_cache_layer, with_kwargs=True)
            if not layer.is_softmax:
                module.linear_attention = added[layer.index]
        self._use(config.attention)
        self.get_decoder().register_forward_pre_hook(find_sequences, with_kwargs=True)
        self.get_decoder().register_forward_hook(restore_batch, with_kwargs=True)
        self.post_init()

    def get_decoder(self) -> Any:
        decoder = self.model.get_decoder()
        return getattr(decoder, "model", decoder)  # of Llama 4, transformers names the decoder with its head

    @property
    def base_model(self) -> Any:
        """The decoder, without the head: what transformers means by it, not what this class wraps."""
        return self.get_decoder()

    # --- the linearized layers ------------------------------------------------------------------------------

    def linear_layers(self) -> Iterator[tuple[int, Any]]:
        """(layer index, its `HybridAttention`, or PEFT's wrapper of it) of every linearized layer."""
        for layer in self.config.linear_layers:
            yield layer.index, self.model.get_submodule(layer.module).linear_attention

    @torch.no_grad()
    def set_exact(self, exact: Mapping[int, Sequence[int]]) -> None:
        """Make KV heads of linearized layers exact, by layer; their feature maps are dropped.

        Caches filled before cannot be used any more.
        """
        changed = []
        for layer in self.config.layer_heads:
            if layer.index in exact and not layer.is_softmax:
                attention: Any = self.model.get_submodule(layer.module)
                before = attention.linear_attention
                layer = replace(layer, exact=(*layer.exact, *exact[layer.index]))
                if layer.is_softmax:
                    del attention.linear_attention
                else:
                    attention.linear_attention = before.without(layer)
            changed.append(layer)
        self.config.layer_heads = changed
        self._use(replace(self.config.attention, exact=tuple(self.config.exact_heads)))

    def set_attention(self, **settings: Any) -> None:
        """Change attention settings that need no training (those marked `adjustable` in `AttentionConfig`).

        Caches filled before cannot be used any more.

        Raises:
            ValueError: a setting that is not adjustable, or as `AttentionConfig`; nothing has changed.
        """
        adjustable = [item.name for item in fields(AttentionConfig) if item.metadata.get("adjustable")]
        for name in settings:
            if name not in adjustable:
                raise ValueError(f"{name}: only {', '.join(adjustable)} can be changed without training")
        self._use(replace(self.config.attention, **settings))

    def _fitting(self, attention: AttentionConfig) -> AttentionConfig:
        """The settings with the exact heads' window in tokens.

        Raises:
            ValueError: they do not fit the base model.
        """
        if attention.exact_tokens is not None and getattr(self.config.text_config, "attention_chunk_size", None):
            raise ValueError("exact_window: layers that attend within chunks have none; set it to null")
        if isinstance(attention.exact_window, str) and attention.exact_budget is None:  # it is known which are exact
            tokens = window_in_budget(self.config, attention, self.model.dtype)
            attention = replace(attention, exact_window=tokens)
        return attention

    def _use(self, attention: AttentionConfig) -> None:
        """Hand the settings to all layers; raises as `_fitting`, before anything changes."""
        self.config.attention = attention = self._fitting(attention)
        for layer in self.config.layer_heads:
            module: Any = self.model.get_submodule(layer.module)
            module.attention_config = attention  # of the exact heads
        for _, module in self.linear_layers():
            module.config = attention

    # --- transformers ---------------------------------------------------------------------------------------

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.model.set_output_embeddings(value)

    def save_pretrained(
        self, save_directory: str | os.PathLike, *args: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """As for any model; the folder also gets the source files to load it where this package is missing.

        So does everything that saves through here: Trainer's checkpoints, `push_to_hub`.
        """
        hub = {name: kwargs.pop(name) for name in _HUB_OPTIONS if push_to_hub and name in kwargs}
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            write_code(Path(save_directory))
        if push_to_hub:  # only now is the folder complete
            self.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)

    def set_attn_implementation(self, attn_implementation: str | dict, *args: Any, **kwargs: Any) -> None:
        """Refused: another implementation would silently bring softmax attention back."""
        if attn_implementation != ATTENTION_NAME:
            raise ValueError(
                f"attn_implementation={attn_implementation!r}: a linearized model has its own attention; use"
                ' attention_call=AttentionCall(mode="softmax") for the softmax attention of the base model'
            )

    def initialize_weights(self) -> None:
        """As any model's; parameters of ours that a checkpoint lacks start as in a fresh conversion."""
        super().initialize_weights()
        for module in self.modules():
            if isinstance(module, HybridAttention):  # the base model's class does not know it
                module.reset_parameters()


class LolcatsForCausalLM(LolcatsPreTrainedModel, GenerationMixin):
    """A causal language model whose attention layers are (mostly) linear; transformers uses it like any other."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        attention_call: AttentionCall | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> Any:
        """The base model's forward pass.

        Args:
            attention_mask: [B, past + T], 0 for padding on any side.
            position_ids: [B, T]. Without attention_mask and cache, positions that restart within a row
                separate documents; no cache is made then. For other positions of one document there is
                `rotary_positions` [B, T], for whole sequences without padding.
            use_cache: None: no cache for training, else as the base model's config says.
            attention_call: what this pass wants of the linearized layers; None: hybrid attention.
            cache: another name for past_key_values, which transformers uses since 5.24.
        """
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache is None and (self.training or labels is not None):
            use_cache = False  # nobody would read it
        if attention_call is not None:
            kwargs[ATTENTION_CALL] = attention_call
        return self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **{CACHE: cache},
            **kwargs,
        )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, and with it all that starts it: `generate_batch`, cache_implementation="paged"."""
        raise NotImplementedError(
            "transformers' continuous batching pages keys and values, and linear attention keeps states: call"
            " generate() with a padded batch, or run `lolcats serve`, which batches continuously"
        )

    def prepare_inputs_for_generation(  # type: ignore[override, unused-ignore]  # the rest goes to the base model as it is
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The base model's, which some families change."""
        return self.model.prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)

    def _prepare_cache_for_generation(self: Any, generation_config: Any, model_kwargs: dict, *args: Any) -> Any:
        if generation_config.is_assistant or GenerationMode.ASSISTED_GENERATION in args:
            raise ValueError(
                "assisted decoding removes tokens from the cache, and linear states cannot forget any: call generate()"
                " without prompt_lookup_num_tokens and assistant_model, and use no linearized model as the assistant"
            )
        if generation_config.cache_implementation == "quantized":
            raise ValueError(NOT_QUANTIZED)
        if generation_config.cache_implementation in ALL_STATIC_CACHE_IMPLEMENTATIONS:
            generation_config.cache_implementation = None  # a state has one size anyway
        GenerationMixin._prepare_cache_for_generation(self, generation_config, model_kwargs, *args)

    def _valid_auto_compile_criteria(self, model_kwargs: dict, generation_config: Any) -> bool:
        """Whether generate() runs steps by `get_compiled_call`; transformers would compile those with static caches."""
        if self.device.type != "cuda" or recurrent_layers(self.config) or given_cache(model_kwargs) is None:
            return False
        usual = generation_config.num_beams == 1 and not generation_config.output_hidden_states
        here = torch.device("cuda", torch.cuda.current_device())  # whose launches are captured
        return usual and not generation_config.disable_compile and {x.device for x in self.parameters()} == {here}

    def get_compiled_call(self, compile_config: Any) -> Any:
        return CapturedSteps(self)


class LolcatsModel(LolcatsPreTrainedModel):
    """The hidden states of a linearized model. Its head is not used, but stays, so that saved folders are complete."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> Any:
        """The decoder's forward pass; arguments as of `LolcatsForCausalLM.forward`."""
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache is None and self.training:
            use_cache = False
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": use_cache, CACHE: cache}
        return self.get_decoder()(**given, **kwargs)
