from __future__ import annotations

import random

import pytest

from lolcats.data.mixture import choose, mixture_counts


@pytest.mark.parametrize(
    ("available", "weights", "limit", "expected"),
    [
        ([7], [3.0], None, [7]),
        ([7], [3.0], 5, [5]),
        ([7, 100], [1.0, 1.0], None, [7, 100]),
        ([100, 300], [2.0, 2.0], 40, [10, 30]),
        ([100, 100], [3.0, 1.0], None, [100, 33]),
        ([10, 1000], [0.1, 0.9], None, [10, 90]),  # binary 0.1 would give [9, 90]
        ([30, 100, 100], [0.3, 0.3, 0.4], None, [30, 30, 40]),
        ([100, 100], [3.0, 1.0], 8, [6, 2]),
        ([100, 100], [3.0, 1.0], 9, [7, 2]),
        ([0, 5], [2.0, 1.0], None, [0, 0]),
        ([0, 0], [1.0, 1.0], None, [0, 0]),
    ],
)
def test_counts(available, weights, limit, expected) -> None:
    assert mixture_counts(available, weights, limit) == expected


def test_counts_keep_shares_repeat_nothing_and_cannot_grow() -> None:
    rng = random.Random(0)
    for _ in range(300):
        size = rng.randrange(2, 5)
        available = [rng.randrange(50, 500) for _ in range(size)]
        weights = [round(rng.uniform(0.1, 5), 2) for _ in range(size)]
        counts = mixture_counts(available, weights)
        total = sum(counts)
        assert all(count <= most for count, most in zip(counts, available, strict=True))
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - total * weight / sum(weights)) < 1
        # The largest: one more sequence would ask some source for more than it has.
        larger = (total + 1) / sum(weights)
        pairs = zip(available, weights, strict=True)
        assert any(larger * weight > most for most, weight in pairs) or len(set(weights)) == 1


def test_choice_is_seeded_sorted_and_without_repeats() -> None:
    chosen = choose(100, 30, seed=1, source=0)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert chosen.tolist() == choose(100, 30, seed=1, source=0).tolist()
    assert chosen.tolist() != choose(100, 30, seed=2, source=0).tolist()
    assert chosen.tolist() != choose(100, 30, seed=1, source=1).tolist()
    assert choose(5, 5, seed=1, source=0).tolist() == [0, 1, 2, 3, 4]
