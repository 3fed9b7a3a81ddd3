"""vLLM's scheduler, which looks at the pages of a sequence that generates only where they change."""

from __future__ import annotations

from copy import copy
from typing import Any

from vllm.config import VllmConfig

# So many tokens after a prompt, and from the beginning of a page, are asked about when the passes that are on their way
# have ended: then earlier pages are freed, and full ones entered for prefix caching.
LATE = 2


def scheduler(*, vllm_config: VllmConfig, **given: Any) -> Any:
    """The scheduler that vLLM would take.

    For each token of a sequence it asks each group of pages four questions, and a model with exact heads has four
    groups. Inside of pages the answer to all is that nothing changes, which is given here at once.
    """
    settings = copy(vllm_config.scheduler_config)
    settings.scheduler_cls = None
    made: Any = settings.get_scheduler_cls()(vllm_config=vllm_config, **given)
    books = made.kv_cache_manager
    ask, sizes = books.allocate_slots, {group.block_size for group in books.coordinator.single_type_managers}

    def allocate_slots(request: Any, num_new_tokens: int, **rest: Any) -> Any:
        tokens, late = request.num_computed_tokens + num_new_tokens, LATE + request.num_in_flight_tokens
        single = num_new_tokens == 1 and rest == {"num_lookahead_tokens": 0}  # else of a prompt, or one that comes back
        if single and late < request.singles and all(late < tokens % size for size in sizes):
            return books.empty_kv_cache_blocks
        found = ask(request, num_new_tokens, **rest)
        if found is not None:  # not refused
            request.singles = request.singles + 1 if single else 0
        return found

    books.allocate_slots = allocate_slots
    return made
