"""`reference` against the equation written as loops."""

from __future__ import annotations

from dataclasses import replace

import hybrid_wrong
import pytest
from hybrid_cases import GROUPS, SHARES, chunked, make_case, reference
from hybrid_checks import check_equation

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.feature_maps import feature_map_names

WINDOWS = [
    AttentionConfig("sliding", 1),
    AttentionConfig("sliding", 5),
    AttentionConfig("sliding", 5, sinks=2),
    AttentionConfig("sliding", 0),
    AttentionConfig("sliding", 0, sinks=2),
    AttentionConfig("terraced", 0),
    AttentionConfig("terraced", 1),
    AttentionConfig("terraced", 4, window_blocks=1),
    AttentionConfig("terraced", 4, window_blocks=2),
    AttentionConfig("terraced", 3, window_blocks=3, sinks=1),
    AttentionConfig("terraced", 4, sinks=11),
]


def small(spec: AttentionConfig, tokens: int = 15, **options):
    return make_case(spec, tokens, **({"batch": 1, "head_dim": 4, "columns": 3} | options))


@pytest.mark.parametrize(
    ("spec", "feature_map"),
    [(spec, name) for spec in WINDOWS for name in (*feature_map_names(), None) if spec.window_size or name],
    ids=str,
)
def test_all_windows_and_feature_maps(spec: AttentionConfig, feature_map: str | None) -> None:
    check_equation(reference, small(replace(spec, feature_map=feature_map)))


@pytest.mark.parametrize("share_state", SHARES)
@pytest.mark.parametrize(("kv_heads", "repeats"), GROUPS)
def test_groups(kv_heads: int, repeats: int, share_state: str) -> None:
    spec = AttentionConfig("terraced", 4, sinks=1, feature_map="t2r")
    case = small(spec, batch=2, kv_heads=kv_heads, repeats=repeats, share_state=share_state)
    check_equation(reference, case)


@pytest.mark.parametrize("sink_logits", [False, True])
@pytest.mark.parametrize("options", [{"scale": 0.7}, {"softcap": 1.5}], ids=str)
@pytest.mark.parametrize("spec", WINDOWS, ids=str)
def test_scale_softcap_and_sink_logits(spec: AttentionConfig, options: dict, sink_logits: bool) -> None:
    check_equation(reference, small(spec, sink_logits=sink_logits), **options)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("spec", WINDOWS, ids=str)
def test_short_sequences(spec: AttentionConfig, tokens: int) -> None:
    check_equation(reference, small(spec, tokens))


def test_catches_blocks_counted_from_the_end() -> None:
    spec = AttentionConfig("terraced", 4)
    check_equation(hybrid_wrong.blocks_from_the_end, small(spec, 16))  # the same blocks
    with pytest.raises(AssertionError, match="equation, output"):
        check_equation(hybrid_wrong.blocks_from_the_end, small(spec, 15))


def test_catches_linear_terms_inside_the_window() -> None:
    with pytest.raises(AssertionError, match="equation, output"):
        check_equation(hybrid_wrong.linear_terms_in_the_window, small(AttentionConfig("sliding", 5)))


def test_catches_log_sum_exp_in_place_of_the_row_maximum() -> None:
    spec = AttentionConfig("sliding", 5)
    check_equation(hybrid_wrong.log_sum_exp_for_row_maximum, small(spec, 5))  # cancels without a linear part
    with pytest.raises(AssertionError, match="equation, output"):
        check_equation(hybrid_wrong.log_sum_exp_for_row_maximum, small(spec, 6))


def test_catches_a_state_shared_by_the_wrong_heads() -> None:
    spec = AttentionConfig("sliding", 5)
    one_group = small(spec, kv_heads=1, repeats=4)
    check_equation(hybrid_wrong.groups_interleaved, one_group)
    check_equation(chunked, small(spec, kv_heads=2, repeats=2))
    with pytest.raises(AssertionError, match="equation, output"):
        check_equation(hybrid_wrong.groups_interleaved, small(spec, kv_heads=2, repeats=2))
