"""Settings of vLLM that a linearized model takes where the user names none."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from lolcats.modeling.cache_size import native_window, window_in_budget
from lolcats.vllm_plugin.pages import block_bytes, is_bounded

logger = logging.getLogger("vllm.lolcats")
# A snapshot for prefix caching is a whole state, for Llama 3 8B as many bytes as a softmax model's 256 tokens. vLLM
# would take one every 16 tokens, which costs more than it saves.
SNAPSHOT_TOKENS = 1024


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raises ValueError for settings that this plugin does not implement."""
    for setting in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(vllm_config.parallel_config, setting, 1)) > 1:
            raise ValueError(f"{setting}={size}: states are not shared out among ranks by tokens; leave it out")


def lower_sequences(vllm_config: VllmConfig) -> None:
    """Bounds `max_num_seqs` by the blocks that surely fit beside the weights: with fewer vLLM does not start."""
    scheduler, cache, model = vllm_config.scheduler_config, vllm_config.cache_config, vllm_config.model_config
    config, ranks = model.hf_config, vllm_config.parallel_config.tensor_parallel_size
    if (memory := cache.kv_cache_memory_bytes) is None:
        weights = sum(path.stat().st_size for path in Path(model.model).glob("*.safetensors"))
        memory = 0.9 * cache.gpu_memory_utilization * current_platform.get_device_total_memory() - weights / ranks
    block = 1.05 * block_bytes(config, model.dtype, ranks)  # vLLM pads pages
    if scheduler.max_num_seqs > (fits := max(int(memory / block), 1)):
        logger.warning("max_num_seqs=%d, not %d: a block has %d MiB", fits, scheduler.max_num_seqs, block / 2**20)
        scheduler.max_num_seqs = fits


class LolcatsDefaults(VerifyAndUpdateConfig):
    """A window of exact heads in bytes (`--hf-overrides`) becomes tokens; prefix caching keeps a state every
    `SNAPSHOT_TOKENS` tokens; the scheduler asks about pages where they change.

    Where exact heads keep all keys, vLLM makes blocks as long as a page of these needs to be as large as a state; there
    prefixes end at multiples of `PREFIX_UNIT` tokens.
    """

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        from lolcats.vllm_plugin.layer import PREFIX_UNIT  # registers an operator

        refuse_unsupported(vllm_config)
        if vllm_config.scheduler_config.scheduler_cls is None:
            vllm_config.scheduler_config.scheduler_cls = "lolcats.vllm_plugin.scheduler.scheduler"
        cache, config = vllm_config.cache_config, vllm_config.model_config.hf_config
        if isinstance(config.attention.exact_window, str):
            window = window_in_budget(config, config.attention, vllm_config.model_config.dtype)
            config.attention = replace(config.attention, exact_window=window)
        grows = any(layer.exact and not is_bounded(config, layer) for layer in config.layer_heads)
        named = cache.user_specified_block_size or cache.mamba_block_size is not None
        if cache.enable_prefix_caching and not named and not grows:
            cache.block_size = cache.mamba_block_size = SNAPSHOT_TOKENS
            cache.user_specified_block_size = True
        # With states beside keys, and no windows of keys, whose blocks vLLM finds as a whole.
        states = any(not layer.is_softmax for layer in config.layer_heads)
        windows = any(layer.exact and native_window(config, layer) is not None for layer in config.layer_heads)
        fits = not cache.user_specified_block_size or cache.block_size % PREFIX_UNIT == 0
        fits = fits and cache.enable_prefix_caching and cache.prefix_match_unit is None
        if fits and grows and states and not windows:
            cache.prefix_match_unit = PREFIX_UNIT
        if current_platform.is_cuda_alike():
            lower_sequences(vllm_config)
