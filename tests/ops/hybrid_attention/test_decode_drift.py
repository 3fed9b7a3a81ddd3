"""4 000 decode steps of bf16 activations: the error at the end is that of the start."""

from __future__ import annotations

import hybrid_wrong
import pytest
import torch
from hybrid_cases import chunked, make_case
from hybrid_checks import check_no_drift

from lolcats.config.attention import AttentionConfig

STEPS = 4000


def long_case(spec: AttentionConfig):
    """Parameters in float32, activations in bf16; values with a mean, so that outputs do not shrink."""
    case = make_case(spec, STEPS, batch=1, kv_heads=1, repeats=2, dtype=torch.float32)
    case.q, case.k, case.v = case.q.bfloat16(), case.k.bfloat16(), (1.0 + case.v).bfloat16()
    return case


@pytest.mark.parametrize(
    "spec",
    [
        AttentionConfig("terraced", 16),
        AttentionConfig("sliding", 16, sinks=2),
        AttentionConfig("sliding", 0, feature_map="elu"),
    ],
    ids=str,
)
def test_error_does_not_grow(spec: AttentionConfig) -> None:
    check_no_drift(chunked, long_case(spec))


@pytest.mark.parametrize("spec", [AttentionConfig("terraced", 16), AttentionConfig("sliding", 16)], ids=str)
def test_catches_sums_in_bf16(spec: AttentionConfig) -> None:
    with pytest.raises(AssertionError, match="drift"):
        check_no_drift(hybrid_wrong.bf16_state, long_case(spec))
