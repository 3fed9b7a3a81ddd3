"""Exact heads with a window, in 8 bits or not, give transformers' answers however vLLM schedules."""

from __future__ import annotations

import pytest
from test_vllm_answers import HEADS
from vllm_kit import PROMPTS, assert_same, transformers_answers

# Shorter than most prompts. Of four KV heads two apart from each other, all, one, and one of a fourth layer.
WINDOW = {"exact": ["0.0", "0.2", 1, "2.3"], "exact_window": 40, "sinks": 2}
BOUNDED = HEADS | {"attention": WINDOW}
PLUS = HEADS | {"attention": WINDOW | {"exact_bits": 8}}


@pytest.mark.parametrize("options", [BOUNDED, PLUS], ids=["window", "8-bits"])
def test_alone_together_and_in_another_order(folder, serve, options) -> None:
    path = folder(**options)
    served = serve(path)
    expected = transformers_answers(path)
    assert_same([served.answers([prompt])[0] for prompt in PROMPTS], expected)
    assert_same(served.answers(PROMPTS), expected)
    assert_same(served.answers(PROMPTS[::-1])[::-1], expected)
