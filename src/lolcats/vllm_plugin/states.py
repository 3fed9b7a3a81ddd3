"""How vLLM's scheduler keeps the books of states and exact heads: as of its own, at once where nothing changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclass(frozen=True)
class StateSpec(MambaSpec):
    """Of pages whose books `StateManager` keeps."""


class StateManager(MambaManager):
    """vLLM's, without work where one more token leaves a sequence's pages as they are.

    Each step the scheduler asks every group of states four questions a sequence, and a model with exact heads has three
    groups. What is answered here at once vLLM would answer alike, without a change.
    """

    def _in_last_page(self, request_id: str, tokens: int) -> bool:
        """Whether the state after so many tokens is in the sequence's last page, and no copy or checkpoint is due."""
        if self.mamba_cache_mode != "align" or request_id not in self._allocated_block_reqs:
            return False
        due = self.num_speculative_blocks or request_id in self._partial_hit_reqs or request_id in self._checkpoints
        return not due and 0 <= len(self.req_to_blocks[request_id]) * self.block_size - tokens < self.block_size

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *given: Any, **rest: Any) -> int:
        new_computed_blocks, total_computed_tokens, _, num_tokens_main_model = given
        one_more = num_tokens_main_model == total_computed_tokens + 1 and not new_computed_blocks
        if one_more and self._in_last_page(request_id, num_tokens_main_model):
            return 0
        return super().get_num_blocks_to_allocate(request_id, num_tokens, *given, **rest)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        if self._in_last_page(request_id, num_tokens_main_model):
            return []
        return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        past_prompt = self.mamba_cache_mode == "align" and num_tokens > request.num_prompt_tokens
        cached = self.num_cached_block.get(request.request_id, 0)
        if past_prompt and num_tokens // self.block_size <= cached and request.request_id not in self._checkpoints:
            return
        super().cache_blocks(request, num_tokens, *args, **kwargs)

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int, *args: Any) -> None:
        if self.mamba_cache_mode == "align":
            retired = self._num_retired_blocks.get(request_id, 0)
            if (processed_computed_tokens - 1) // self.block_size <= retired:
                return
        super().remove_skipped_blocks(request_id, processed_computed_tokens, *args)


@dataclass(frozen=True)
class KeySpec(FullAttentionSpec):
    """Of exact heads beside linear ones that keep all keys, whose books `KeyManager` keeps."""


class KeyManager(FullAttentionManager):
    """vLLM's, which enters where a prompt ends inside a block again in each step; here once, and for each new block."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entered: dict[str, tuple[int, int]] = {}  # of prompts: their tokens (sessions add some), full blocks then

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        prompt, full = self.entered.get(request.request_id, (0, -1))
        if prompt == request.num_prompt_tokens and num_tokens // self.block_size <= full:
            return
        super().cache_blocks(request, num_tokens, *args, **kwargs)
        if num_tokens >= request.num_prompt_tokens:
            full = self.num_cached_block.get(request.request_id, 0)
            self.entered[request.request_id] = request.num_prompt_tokens, full

    def pop_blocks_for_free(self, request_id: str) -> Any:
        self.entered.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)


KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # registers vLLM's own, which it does only while there are none
KVCacheSpecRegistry.register(StateSpec, StateManager, uniform_type_base_spec=MambaSpec)
KVCacheSpecRegistry.register(KeySpec, KeyManager, uniform_type_base_spec=FullAttentionSpec)
