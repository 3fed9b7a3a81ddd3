"""A window that holds the whole sequence makes hybrid attention softmax attention."""

from __future__ import annotations

import hybrid_wrong
import pytest
import torch
from hybrid_cases import IMPLEMENTATIONS, SHARES, TOLERANCE, assert_near, make_case
from hybrid_checks import check_softmax_limit

from lolcats.config.attention import AttentionConfig

# Window just as long as the sequence, longer, blocks that begin inside the sequence, no linear part.
WIDE = [
    (AttentionConfig("sliding", 40), 40),
    (AttentionConfig("sliding", 90, sinks=3), 70),
    (AttentionConfig("terraced", 20), 40),
    (AttentionConfig("terraced", 64), 65),
    (AttentionConfig("terraced", 64, window_blocks=1), 63),
    (AttentionConfig("terraced", 8, window_blocks=3, sinks=1), 24),
    (AttentionConfig("terraced", 64, feature_map=None), 100),
    (AttentionConfig("sliding", 1, sinks=30), 31),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("share_state", SHARES)
@pytest.mark.parametrize("repeats", [1, 3, 4])
@pytest.mark.parametrize(("spec", "tokens"), WIDE, ids=str)
@pytest.mark.parametrize("backend", list(IMPLEMENTATIONS))
def test_equals_torch_sdpa(backend, spec, tokens, repeats, share_state, dtype) -> None:
    case = make_case(spec, tokens, repeats=repeats, share_state=share_state, dtype=dtype)
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q, case.k.repeat_interleave(repeats, 1), case.v.repeat_interleave(repeats, 1), is_causal=True
    )
    y, _ = case.run(IMPLEMENTATIONS[backend])
    assert_near(y, expected, TOLERANCE[dtype], "sdpa")


@pytest.mark.parametrize("sink_logits", [False, True])
@pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"softcap": 2.0}, {"softcap": 2.0, "scale": 0.7}], ids=str)
@pytest.mark.parametrize("backend", list(IMPLEMENTATIONS))
def test_equals_the_formula_with_scale_softcap_and_sink_logits(backend, options, sink_logits) -> None:
    for spec, tokens in WIDE:
        case = make_case(spec, tokens, repeats=3, sink_logits=sink_logits)
        check_softmax_limit(IMPLEMENTATIONS[backend], case, **options)


def test_catches_linear_terms_inside_the_window() -> None:
    case = make_case(AttentionConfig("terraced", 20), 40)
    with pytest.raises(AssertionError, match="softmax limit"):
        check_softmax_limit(hybrid_wrong.linear_terms_in_the_window, case)
