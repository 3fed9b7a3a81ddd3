"""How many sequences, and which, each source gives to the mixture."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from lolcats.data.sampler import seeded_permutation


def is_weighted(weights: list[float]) -> bool:
    """Whether the weights, rather than the sources' sizes, decide the shares."""
    return len(set(weights)) > 1


def mixture_counts(available: list[int], weights: list[float], limit: int | None = None) -> list[int]:
    """Sequences to take from every source.

    Unequal weights are the sources' shares of the mixture's sequences (to within one sequence). The
    mixture is the largest that repeats nothing: the source that is scarce for its weight is used in full.
    Equal weights use every source in full. `limit` caps the total and keeps the shares.
    """
    total = sum(available)
    if total == 0:
        return [0] * len(available)
    if is_weighted(weights):
        exact = [Fraction(str(weight)) for weight in weights]  # decimal, so that 0.3 is three tenths
        shares = [weight / sum(exact) for weight in exact]
        size = int(min(count / share for count, share in zip(available, shares, strict=True)))
    else:
        shares = [Fraction(count, total) for count in available]
        size = total
    if limit is not None:
        size = min(size, limit)
    ideal = [size * share for share in shares]
    counts = [int(value) for value in ideal]
    # Largest remainders first; rounding up never exceeds `available`, which is whole and >= ideal.
    by_remainder = sorted(range(len(ideal)), key=lambda source: (counts[source] - ideal[source], source))
    for source in by_remainder[: size - sum(counts)]:
        counts[source] += 1
    return counts


def choose(available: int, count: int, seed: int, source: int) -> np.ndarray:
    """[count] int64: a seeded choice of `count` of `available` sequences, in their original order."""
    if count == available:
        return np.arange(count, dtype=np.int64)
    return np.sort(seeded_permutation(available, seed, source)[:count])
