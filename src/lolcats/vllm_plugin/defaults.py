"""Settings of vLLM that a linearized model takes where the user names none."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

# A snapshot for prefix caching is a whole state, for Llama 3 8B as many bytes as a softmax model's 256 tokens. vLLM
# would take one every 16 tokens, which costs more than it saves.
SNAPSHOT_TOKENS = 1024


class LolcatsDefaults(VerifyAndUpdateConfig):
    """Prefix caching keeps a state every `SNAPSHOT_TOKENS` tokens.

    With exact heads vLLM makes blocks as long as a page of their keys needs to be as large as a state.
    """

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        cache, heads = vllm_config.cache_config, vllm_config.model_config.hf_config.layer_heads
        named = cache.user_specified_block_size or cache.mamba_block_size is not None
        if cache.enable_prefix_caching and not named and not any(layer.exact for layer in heads):
            cache.block_size = cache.mamba_block_size = SNAPSHOT_TOKENS
            cache.user_specified_block_size = True
