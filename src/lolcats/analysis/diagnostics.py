"""What is measured in every layer: output error, the linear part's share, maps of weights.

docs/analysis.md says what the keys of each `result()` are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lolcats.analysis.observe import Seen
from lolcats.config.attention import AttentionConfig

DIGITS = 4  # of the weights in pictures


class _Means:
    """Means of vectors by kind, stage and layer, of sums and counts; later vectors may be longer (more bins)."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, int], tuple[Tensor, Tensor]] = {}

    def add(self, kind: str, seen: Seen, total_K: Tensor, count: Tensor | int, stage: str | None = None) -> None:
        key = (kind, seen.stage if stage is None else stage, seen.layer)
        count_K = torch.as_tensor(count, device=total_K.device).to(total_K.dtype).expand_as(total_K)
        total, before = self._sums.get(key, (torch.zeros_like(total_K), torch.zeros_like(count_K)))
        longest = max(len(total_K), len(total))
        total_K, count_K, total, before = (pad(x, (0, longest - len(x))) for x in (total_K, count_K, total, before))
        self._sums[key] = (total + total_K, before + count_K)

    def by_stage(self, kind: str) -> dict[str, list[list[float]]]:
        """Stage -> layer, in order -> the mean."""
        rows: dict[str, list[list[float]]] = {}
        for (found, stage, _), (total, count) in sorted(self._sums.items(), key=lambda item: item[0][2]):
            if found == kind:
                rows.setdefault(stage, []).append((total / count).tolist())
        return rows

    def by_layer(self, kind: str) -> list[list[float]]:
        """Of what has no stage."""
        return self.by_stage(kind).get("", [])


class OutputError:
    """Mean squared error of hybrid attention's outputs, by stage, layer and head.

    Against the stage's own softmax attention, and against the one before stage 2 on the same hidden states: whether
    adjusted projections bring the layer nearer to the attention that it replaced.
    """

    def __init__(self) -> None:
        self._means = _Means()

    def see(self, seen: Seen) -> None:
        y, own, original = (x.float() for x in (seen.y_hybrid_BHTD, seen.y_softmax_BHTD, seen.y_original_BHTD))
        for kind, error in (("own", y - own), ("original", y - original)):
            self._means.add(kind, seen, error.square().mean(dim=(0, 2, 3)) * len(y), len(y))

    def result(self) -> dict[str, Any]:
        own, original = self._means.by_stage("own"), self._means.by_stage("original")
        return {
            "mse": {stage: _mean_rows(rows) for stage, rows in own.items()},
            "mse_original": {stage: _mean_rows(rows) for stage, rows in original.items()},
            "mse_heads": own,
        }


class LinearShare:
    """How much of the output comes from the linear part: its share of the denominator.

    Rows of the hybrid weights sum to 1, so a sum over the keys outside the window is that share. Also the weights by
    distance between query and key.
    """

    def __init__(self) -> None:
        self._means = _Means()
        self._tokens = 0

    def see(self, seen: Seen) -> None:
        hybrid, softmax, length_N = seen.weights
        tokens = hybrid.shape[-1]
        self._tokens = max(self._tokens, tokens)
        position_T = torch.arange(tokens, device=hybrid.device)
        real_NT = position_T < length_N[:, None]
        count = int(real_NT.sum())
        linear = hybrid * outside_window(seen.module.config, tokens, hybrid.device)
        share_H = (linear.sum(-1) * real_NT[:, None]).sum((0, 2)) / count
        self._means.add("share", seen, share_H * count, count)
        distance_TT = position_T[:, None] - position_T
        self._means.add("hybrid", seen, _by_distance(hybrid, distance_TT, real_NT) * count, count)
        self._means.add("linear", seen, _by_distance(linear, distance_TT, real_NT) * count, count)
        if seen.is_original:
            self._means.add("softmax", seen, _by_distance(softmax, distance_TT, real_NT) * count, count, stage="")

    def result(self) -> dict[str, Any]:
        share = self._means.by_stage("share")
        return {
            "share": {stage: _mean_rows(rows) for stage, rows in share.items()},
            "share_heads": share,
            "distances": doubling_bins(self._tokens),
            "by_distance": self._means.by_stage("hybrid"),
            "linear_by_distance": self._means.by_stage("linear"),
            "softmax_by_distance": self._means.by_layer("softmax"),
        }


class AttentionMaps:
    """Weights between the last queries and the first and last keys of the first sequence, as in the paper's appendix.

    Args:
        layers, heads: which; those that there are not are passed over.
        span: queries, and keys at either end.

    Each map is [span, 2 * span] with rows of increasing query position; it has fewer keys in short sequences.
    """

    def __init__(self, layers: list[int], heads: list[int], span: int = 32) -> None:
        self.layers, self.heads, self.span = layers, heads, span
        self._maps: dict[tuple[int, int], dict[str, Any]] = {}
        self._length = 0

    def see(self, seen: Seen) -> None:
        if seen.layer not in self.layers or any(
            layer == seen.layer and seen.stage in entry for (layer, _), entry in self._maps.items()
        ):
            return
        hybrid, softmax, length_N = seen.weights
        longest = int(length_N.argmax())
        self._length = int(length_N[longest])
        for head in self.heads:
            if head < hybrid.shape[1]:
                entry = self._maps.setdefault((seen.layer, head), {"layer": seen.layer, "head": head})
                if seen.is_original and "softmax" not in entry:
                    entry["softmax"] = self._cut(softmax[longest, head])
                entry[seen.stage] = self._cut(hybrid[longest, head])

    def result(self) -> dict[str, Any]:
        length, span = self._length, min(self.span, self._length)
        return {
            "span": span,
            "queries": [length - span, length - 1],
            "keys": self._keys(),
            "maps": [self._maps[key] for key in sorted(self._maps)],
        }

    def _keys(self) -> list[int]:
        ends = {*range(min(self.span, self._length)), *range(max(self._length - self.span, 0), self._length)}
        return sorted(ends)

    def _cut(self, weight_TT: Tensor) -> list[list[float]]:
        rows = weight_TT[max(self._length - self.span, 0) : self._length][:, self._keys()].float()
        return [[float(f"{value:.{DIGITS}g}") for value in row] for row in rows.tolist()]


def outside_window(attention: AttentionConfig, tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """[T, T] bool: which keys (columns) of which queries (rows) belong to the linear part."""
    position_T = torch.arange(tokens, device=device)
    start_T1 = attention.window_start(position_T)[:, None]
    return (
        (position_T[None] < start_T1)
        & (position_T[None] >= attention.sinks)
        & (position_T[None] <= position_T[:, None])
    )


def doubling_bins(tokens: int) -> list[list[int]]:
    """[first, last] of bins of doubling width, of distances: 0, 1, 2-3, 4-7, ... below `tokens`."""
    bins, first = [[0, 0]], 1
    while first < tokens:
        bins.append([first, min(2 * first, tokens) - 1])
        first *= 2
    return bins


def bin_names(bins: list[list[int]]) -> list[str]:
    """ "0", "1", "2-3", ... of `doubling_bins`."""
    return [str(first) if first == last else f"{first}-{last}" for first, last in bins]


def mean_over_layers(rows: list[list[float]]) -> list[float]:
    """Of layer -> values."""
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def bin_numbers(value: Tensor) -> Tensor:
    """Where in `doubling_bins` each whole number >= 0 is."""
    return torch.frexp(value.double()).exponent.long()  # exact; a GPU's logarithm of 8 is below 3


def _by_distance(weight_NHTT: Tensor, distance_TT: Tensor, real_NT: Tensor) -> Tensor:
    """[bins] float64: mean over real queries and heads of the weight in each bin of distance."""
    mean_TT = (weight_NHTT.mean(1) * real_NT[..., None]).sum(0) / real_NT.sum()
    total_K = mean_TT.new_zeros(len(doubling_bins(len(distance_TT))), dtype=torch.float64)
    causal = distance_TT >= 0
    return total_K.index_add_(0, bin_numbers(distance_TT[causal]), mean_TT[causal].double())


def _mean_rows(rows: list[list[float]]) -> list[float]:
    return [sum(row) / len(row) if row else math.nan for row in rows]
