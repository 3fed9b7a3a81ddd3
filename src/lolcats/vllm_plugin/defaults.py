"""Settings of vLLM that a linearized model takes where the user names none."""

from __future__ import annotations

from dataclasses import replace

from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from lolcats.modeling import LolcatsConfig
from lolcats.modeling.cache_size import native_window, window_in_budget

# A snapshot for prefix caching is a whole state, for Llama 3 8B as many bytes as a softmax model's 256 tokens. vLLM
# would take one every 16 tokens, which costs more than it saves.
SNAPSHOT_TOKENS = 1024
# A prefix may end at multiples of it, if some heads or layers keep all keys. vLLM 0.32 by itself lets it end where
# blocks of keys and of states both do. Often it has no state there, as it keeps one where a prompt's last block of
# states ends, which are shorter. And each sequence that takes a state there registers it again, as if just made: no
# other one may take it in the same step.
PREFIX_UNIT = 16


def takes_prefix_units(config: LolcatsConfig) -> bool:
    """Whether there are states beside keys, and no window of keys, whose blocks vLLM finds as a whole."""
    layers = config.layer_heads
    has_window = any(layer.exact and native_window(config, layer) is not None for layer in layers)
    return not has_window and any(not layer.is_softmax for layer in layers)


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raises ValueError for settings that this plugin does not implement."""
    for setting in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(vllm_config.parallel_config, setting, 1)) > 1:
            raise ValueError(f"{setting}={size}: states are not shared out among ranks by tokens; leave it out")


class LolcatsDefaults(VerifyAndUpdateConfig):
    """A window of exact heads in bytes (`--hf-overrides`) becomes tokens; prefix caching keeps a state every
    `SNAPSHOT_TOKENS` tokens.

    Where exact heads keep all keys, vLLM makes blocks as long as a page of these needs to be as large as a state; there
    prefixes end at multiples of `PREFIX_UNIT` tokens.
    """

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        from lolcats.vllm_plugin.layer import is_bounded  # registers an operator

        refuse_unsupported(vllm_config)
        cache, config = vllm_config.cache_config, vllm_config.model_config.hf_config
        if isinstance(config.attention.exact_window, str):
            window = window_in_budget(config, config.attention, vllm_config.model_config.dtype)
            config.attention = replace(config.attention, exact_window=window)
        grows = any(layer.exact and not is_bounded(config, layer) for layer in config.layer_heads)
        named = cache.user_specified_block_size or cache.mamba_block_size is not None
        if cache.enable_prefix_caching and not named and not grows:
            cache.block_size = cache.mamba_block_size = SNAPSHOT_TOKENS
            cache.user_specified_block_size = True
        unnamed = cache.prefix_match_unit is None
        fits = not cache.user_specified_block_size or cache.block_size % PREFIX_UNIT == 0
        if cache.enable_prefix_caching and grows and unnamed and fits and takes_prefix_units(config):
            cache.prefix_match_unit = PREFIX_UNIT
