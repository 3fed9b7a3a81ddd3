"""Settings of vLLM that a linearized model takes where the user names none."""

from __future__ import annotations

from dataclasses import replace

from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

# A snapshot for prefix caching is a whole state, for Llama 3 8B as many bytes as a softmax model's 256 tokens. vLLM
# would take one every 16 tokens, which costs more than it saves.
SNAPSHOT_TOKENS = 1024


class LolcatsDefaults(VerifyAndUpdateConfig):
    """A window of exact heads in bytes (`--hf-overrides`) becomes tokens; prefix caching keeps a state every
    `SNAPSHOT_TOKENS` tokens.

    Where exact heads keep all keys, vLLM makes blocks as long as a page of these needs to be as large as a state.
    """

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        from lolcats.modeling.cache_size import window_in_budget
        from lolcats.vllm_plugin.layer import is_bounded  # registers an operator

        cache, config = vllm_config.cache_config, vllm_config.model_config.hf_config
        if isinstance(config.attention.exact_window, str):
            window = window_in_budget(config, config.attention, vllm_config.model_config.dtype)
            config.attention = replace(config.attention, exact_window=window)
        grows = any(layer.exact and not is_bounded(config, layer) for layer in config.layer_heads)
        named = cache.user_specified_block_size or cache.mamba_block_size is not None
        if cache.enable_prefix_caching and not named and not grows:
            cache.block_size = cache.mamba_block_size = SNAPSHOT_TOKENS
            cache.user_specified_block_size = True
