"""The benchmark of packed sequences runs where there is no GPU, and its lengths are what it says."""

from __future__ import annotations

import pytest
from rich.console import Console

from lolcats.bench.attention import AttentionBench
from lolcats.bench.ragged import lognormal_lengths, run_ragged


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 7), (5, 5), (32, 32768)])
def test_lengths_sum_to_the_tokens(sequences: int, tokens: int) -> None:
    lengths = lognormal_lengths(sequences, tokens)
    assert len(lengths) == sequences
    assert sum(lengths) == tokens
    assert min(lengths) >= 1


def test_measures_packed_and_dense() -> None:
    bench = AttentionBench(heads=2, kv_heads=1, head_dim=8, feature_dim=4, dtype="float32", device="cpu", budget_s=0.0)
    rows = {(row["implementation"], row["mode"]): row for row in run_ragged(bench, 3, 20, Console(quiet=True))}
    for mode in ("forward", "train"):
        for name in ("packed", "dense"):
            assert rows[name, mode]["ns_per_token"] > 0
        assert "error" in rows["varlen_attn", mode]  # needs a GPU
