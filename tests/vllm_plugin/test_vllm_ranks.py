"""Heads divided among ranks."""

import pytest
import torch
from test_vllm_answers import HEADS
from vllm_kit import ON_GPU, PROMPTS, TOLERANCE, assert_same, transformers_answers

# Of four KV heads the first of two ranks has two: one exact, all, two and none.
SPREAD = ["0.0", "0.2", 1, "2.0", "2.1", "3.3"]


@pytest.mark.parametrize(
    "options",
    [
        {"attention": {"exact": [1]}},
        {"num_key_value_heads": 1, "attention": {"share_state": "query_head"}},  # both ranks hold the key/value head
        HEADS | {"num_hidden_layers": 4, "attention": {"exact": SPREAD}},
        HEADS | {"num_hidden_layers": 4, "attention": {"exact": SPREAD, "exact_window": 40, "sinks": 2}},
    ],
    ids=["hybrid", "one-kv-head", "exact-heads", "bounded"],
)
def test_two_ranks(folder, serve, options) -> None:
    path = folder(**options)
    served = serve(path, tensor_parallel_size=2, max_num_batched_tokens=100)
    tolerance = ON_GPU if torch.cuda.is_available() else TOLERANCE
    assert_same(served.answers(PROMPTS), transformers_answers(path), tolerance)
