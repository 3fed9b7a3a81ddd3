"""The original model as transformers' users run it: SDPA, a DynamicCache, no graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from lolcats.modeling.call import SOFTMAX
from lolcats.modeling.model import LolcatsForCausalLM


@contextmanager
def original_attention(model: LolcatsForCausalLM) -> Iterator[Any]:
    """The wrapped model with transformers' own SDPA attention; within the block only.

    Call it with `attention_call=SOFTMAX`, so that its cache keeps keys and values.
    """
    base: Any = model.model
    before = base.config._attn_implementation
    base.config._attn_implementation = "sdpa"
    try:
        yield base
    finally:
        base.config._attn_implementation = before


class SoftmaxDecoder:
    """Greedy decoding of `batch` sequences that begins with random keys and values of `context` tokens."""

    def __init__(self, base: Any, batch: int, context: int) -> None:
        config = base.config
        self.base = base
        self.cache = DynamicCache(config=config)
        shape = (batch, config.num_key_value_heads, context, config.head_dim)
        for layer in range(config.num_hidden_layers):
            keys, values = (torch.randn(shape, dtype=base.dtype, device=base.device) for _ in range(2))
            self.cache.update(keys, values, layer)
        self.token_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=base.device)

    @torch.no_grad()
    def step(self) -> None:
        output = self.base(input_ids=self.token_B1, past_key_values=self.cache, use_cache=True, attention_call=SOFTMAX)
        self.token_B1 = output.logits[:, -1:].argmax(-1)


def mean_over_run(contexts: list[int], step_ms: list[float]) -> float:
    """Mean step time of a run from the first to the last context: trapezoids between those measured."""
    if len(contexts) == 1:
        return step_ms[0]
    area = sum((contexts[i + 1] - contexts[i]) * (step_ms[i] + step_ms[i + 1]) / 2 for i in range(len(contexts) - 1))
    return area / (contexts[-1] - contexts[0])
