"""vLLM's scheduler, which looks at the pages of a sequence that generates only where they change."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig

# After a prompt, and at the beginning of a page, so many tokens are asked about: earlier pages are freed, and full ones
# entered for prefix caching, when passes that are on their way have ended.
LATE = 4


def scheduler(*, vllm_config: VllmConfig, **given: Any) -> Any:
    """The scheduler that vLLM would take.

    For each token of a sequence it asks each group of pages four questions, and a model with exact heads has four
    groups. Inside of pages the answer to all is that nothing changes, which is given here at once.
    """
    settings = vllm_config.scheduler_config
    settings.scheduler_cls = None
    made: Any = settings.get_scheduler_cls()(vllm_config=vllm_config, **given)
    books = made.kv_cache_manager
    ask, sizes = books.allocate_slots, {group.block_size for group in books.coordinator.single_type_managers}

    def allocate_slots(request: Any, num_new_tokens: int, **rest: Any) -> Any:
        tokens = request.num_computed_tokens + num_new_tokens
        if num_new_tokens != 1 or rest != {"num_lookahead_tokens": 0}:  # of a prompt, or of a sequence that comes back
            request.late = LATE
        elif request.late:
            request.late -= 1
        elif all(tokens % size > LATE for size in sizes):
            return books.empty_kv_cache_blocks
        return ask(request, num_new_tokens, **rest)

    books.allocate_slots = allocate_slots
    return made
